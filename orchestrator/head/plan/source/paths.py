"""The paths that a source opens: for reading, for writing, or to ask whether they are there."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.head.plan.source.values import Scope, Text, Values, dotted, last_name

ASKS, READS, WRITES = "asks", "reads", "writes"
ASKING = frozenset(
    ("exists", "lexists", "isfile", "isdir", "is_file", "is_dir", "access", "glob", "iglob")
)
OPENING = ("open", "io.open", "gzip.open", "bz2.open", "codecs.open", "h5py.File", "tarfile.open")
# Function -> the place of the path among its arguments, and its keywords.
READING = {
    **dict.fromkeys(("torch.load", "torch.jit.load"), (0, "f")),
    **dict.fromkeys(("np.load", "numpy.load", "np.memmap", "numpy.memmap"), (0, "file")),
    **dict.fromkeys(("np.loadtxt", "np.genfromtxt", "np.fromfile"), (0, "fname")),
    **dict.fromkeys(("os.listdir", "os.scandir", "os.walk"), (0, "path")),
    **dict.fromkeys(("Image.open", "PIL.Image.open", "cv2.imread", "imageio.imread"), (0, "fp")),
    **dict.fromkeys(("torchaudio.load", "soundfile.read", "sf.read", "librosa.load"), (0, "uri")),
    **dict.fromkeys(("load_from_disk", "datasets.load_from_disk"), (0, "dataset_path")),
    **dict.fromkeys(("ImageFolder", "DatasetFolder"), (0, "root")),
    **dict.fromkeys(("pq.read_table", "OmegaConf.load"), (0, "source")),
    **dict.fromkeys(("safetensors.torch.load_file", "load_file"), (0, "filename")),
    **dict.fromkeys(
        [f"{pd}.read_{kind}" for pd in ("pd", "pandas") for kind in
         ("csv", "parquet", "json", "pickle", "table", "feather", "excel", "hdf")],
        (0, "filepath_or_buffer"),
    ),
}  # fmt: skip
READING_METHODS = ("read_text", "read_bytes", "iterdir")
DOWNLOADING = (  # of torchvision and torchaudio: with download=True they make it themselves
    *("MNIST", "FashionMNIST", "KMNIST", "EMNIST", "CIFAR10", "CIFAR100", "STL10", "SVHN"),
    *("ImageNet", "LSUN", "CelebA", "Food101", "Flowers102", "OxfordIIITPet", "Imagenette"),
    *("CocoDetection", "VOCDetection", "VOCSegmentation", "LIBRISPEECH", "SPEECHCOMMANDS"),
)
WRITING = {
    **dict.fromkeys(("torch.save", "torch.jit.save", "save_image", "vutils.save_image"), 1),
    **dict.fromkeys(("np.save", "np.savez", "np.savez_compressed", "np.savetxt"), 0),
    **dict.fromkeys(("os.makedirs", "os.mkdir", "plt.savefig", "cv2.imwrite"), 0),
    **dict.fromkeys(("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree"), 1),
    **dict.fromkeys(("shutil.move", "urlretrieve", "urllib.request.urlretrieve"), 1),
    **dict.fromkeys(("joblib.dump", "os.rename", "os.replace"), 1),
    **dict.fromkeys(("sqlite3.connect", "TrainingArguments", "torchaudio.save"), 0),
    **dict.fromkeys(("FileHandler", "logging.FileHandler", "SummaryWriter"), 0),
    **dict.fromkeys(("safetensors.torch.save_file", "save_file"), 1),
}
WRITING_METHODS = (
    *("save_pretrained", "save_state", "save_model", "savefig", "to_csv", "to_parquet"),
    *("to_pickle", "to_json", "save_to_disk", "export_chrome_trace"),
)
WRITING_SELF = ("mkdir", "write_text", "write_bytes", "touch")  # methods of a path
PLACES = (  # keywords that name where something is written, whatever is called
    *("output_dir", "save_dir", "log_dir", "logdir", "logging_dir", "dirpath", "out_dir"),
    *("default_root_dir", "ckpt_dir", "checkpoint_dir", "checkpoint_id", "tensorboard_dir"),
)
NO_FILES = ("/dev", "/proc", "/sys")


@dataclass(frozen=True)
class Touch:
    """One path that a source opens."""

    path: str
    how: str  # asks, reads or writes
    file: str
    line: int
    whole: bool = True  # else more follows that is not known
    guarded: bool = False  # the program goes on where it is not there


def touches(found: list[Scope], values: Values) -> Iterator[Touch]:
    for scope in found:
        for call, guarded in scope.calls:
            for how, expression in paths_of(call):
                text = values.of(expression, scope)
                if text is not None and is_path(text):
                    path = text.text.rstrip("/") or "/" if text.whole else text.text
                    line = call.lineno
                    yield Touch(path, how, values.file, line, whole=text.whole, guarded=guarded)


def is_path(text: Text) -> bool:
    words = text.text
    return (
        bool(words.strip())
        and words.isprintable()
        and not any(mark in words for mark in ("://", "*", "{", "%"))
        and not words.startswith(NO_FILES)
        and len(words) < 1000
    )


def paths_of(call: ast.Call) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield how a call treats the paths among its arguments."""
    name, full = last_name(call.func), dotted(call.func) or ""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    of_self = call.func.value if isinstance(call.func, ast.Attribute) else None
    first = call.args[0] if call.args else None
    for named in PLACES:
        if named in keywords and name != "add_argument":
            yield WRITES, keywords[named]
    if full in OPENING:
        how = opened_for(call, keywords, 1)
        yield how, first or keywords.get("file", keywords.get("name"))
    elif name in ASKING:
        yield ASKS, first
        yield ASKS, of_self
    elif full in READING or name in READING:
        place, keyword = READING.get(full) or READING[name]
        how = opened_for(call, keywords, 2) if name == "memmap" else READS
        yield how, argument(call, place) or keywords.get(keyword)
    elif name in DOWNLOADING:
        download = keywords.get("download")
        downloads = isinstance(download, ast.Constant) and download.value is True
        if download is None or isinstance(download, ast.Constant):
            yield ASKS if downloads else READS, first or keywords.get("root")
    elif full in WRITING:
        yield WRITES, argument(call, WRITING[full])
    elif name in WRITING_METHODS and of_self is not None:
        yield WRITES, first
    elif name in READING_METHODS and of_self is not None:
        yield READS, of_self
    elif name in WRITING_SELF and of_self is not None:
        yield WRITES, of_self
    elif name == "open" and of_self is not None and dotted(of_self) not in ("os", "Image"):
        yield opened_for(call, keywords, 0), of_self


def opened_for(call: ast.Call, keywords: dict[str, ast.expr], place: int) -> str:
    mode = argument(call, place) or keywords.get("mode")
    text = mode.value if isinstance(mode, ast.Constant) else "r" if mode is None else "?"
    if not isinstance(text, str) or text == "?":
        return ASKS  # not known: of no use but to say that the program minds it
    return WRITES if set(text) & set("wax+") else READS


def argument(call: ast.Call, place: int) -> ast.expr | None:
    return call.args[place] if len(call.args) > place else None


def within(path: str, places: set[str]) -> bool:
    """Tell whether a path is one of these places, or below one."""
    while path not in places:
        above = posixpath.dirname(path)
        if above in (path, ""):
            return False
        path = above
    return True
