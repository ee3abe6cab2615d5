"""Commands on what jobs have left on disks: checkpoints, and experiments to be removed."""
