# Ours, not nanoGPT's: a further attempt continues from the checkpoint in out_dir, if it is whole.
# nanoGPT runs this file among its own settings, after those before it on the command line.
import zipfile

if zipfile.is_zipfile(os.path.join(out_dir, "ckpt.pt")):
    init_from = "resume"
