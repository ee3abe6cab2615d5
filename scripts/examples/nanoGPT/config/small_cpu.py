# Ours, not nanoGPT's: a model and a length that two CPUs train in a second.
backend = "gloo"
device = "cpu"
compile = False
gradient_accumulation_steps = 2
max_iters = 40
eval_interval = 10
eval_iters = 2
log_interval = 1
batch_size = 4
block_size = 32
n_layer = 2
n_head = 2
n_embd = 32
