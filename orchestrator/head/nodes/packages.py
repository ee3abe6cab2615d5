"""Which package to install for a module that nodes lack, and what to type for that."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

# Where the package has another name than the module.
INSTALLED_AS = {
    "Bio": "biopython",
    "Crypto": "pycryptodome",
    "IPython": "ipython",
    "Levenshtein": "python-Levenshtein",
    "MySQLdb": "mysqlclient",
    "OpenGL": "PyOpenGL",
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "absl": "absl-py",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "community": "python-louvain",
    "cupy": "cupy-cuda12x",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "git": "gitpython",
    "hydra": "hydra-core",
    "igraph": "python-igraph",
    "ignite": "pytorch-ignite",
    "imblearn": "imbalanced-learn",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "nvidia_smi": "nvidia-ml-py3",
    "open_clip": "open_clip_torch",
    "pkg_resources": "setuptools",
    "psycopg2": "psycopg2-binary",
    "pylab": "matplotlib",
    "pynvml": "nvidia-ml-py",
    "ruamel": "ruamel.yaml",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "slugify": "python-slugify",
    "umap": "umap-learn",
    "websocket": "websocket-client",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
    # No package index has these under their own name, or it has something else.
    "apex": "git+https://github.com/NVIDIA/apex",
    "clip": "git+https://github.com/openai/CLIP",
    "detectron2": "git+https://github.com/facebookresearch/detectron2",
    "segment_anything": "git+https://github.com/facebookresearch/segment-anything",
    "taming": "git+https://github.com/CompVis/taming-transformers",
}
OF_TORCH = ("torch", "functorch", "torchgen")
WITH_CUDA = ("triton",)  # comes with torch's CUDA build
MODULE = re.compile(r"No module named ['\"]?([A-Za-z_]\w*)")


def is_missing(message: str) -> bool:
    """Return True for an error that says that a package is not installed."""
    return "No module named" in message


def package_of(module: str) -> str:
    """Return what to install for a module, by the name of its outermost package."""
    top = module.partition(".")[0]
    return "torch" if top in OF_TORCH else INSTALLED_AS.get(top, top.replace("_", "-"))


def bootstrap_words(modules: Iterable[str], torch: str = "") -> str:
    """Return the command that makes an environment with these modules and torch on all nodes.

    `torch` is the version that nodes have now; its build is that of the index.
    """
    packages = dict.fromkeys(package_of(module) for module in modules if module not in WITH_CUDA)
    others = (name for name in packages if name != "torch" and not name.startswith("git+"))
    release = torch.partition("+")[0]
    first = f"torch=={release}" if release else "torch"
    return " ".join(["orchestrator", "bootstrap", *map(shlex.quote, [first, *others])])


def missing(message: str, *, everywhere: bool) -> str:
    """Say what to do about a module, by the message of Python's error.

    Not `everywhere`: a rank lacks it, and the job was over before others could look for it.
    """
    match = MODULE.search(message)
    module = match[1] if match else ""
    who = "no node has it" if everywhere else f"{module or 'it'} is missing there, if nowhere else"
    words = bootstrap_words(["numpy", module] if module else ["numpy"])
    return (
        f"{who}: `{words}`, with what else the program imports, makes the same environment"
        " on all nodes (--activate bootstrap); or install it there for the Python that the job"
        " runs (--python chooses another), or say where it is with --env PYTHONPATH=DIR"
    )
