"""Three examples for each command, which its help shows: what to type, and what it does."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("orchestrator demo", "train on a cluster made on this machine"),
        ("master_launch train.py --epochs 3", "run train.py on all nodes of node_ip_list.txt"),
        ("orchestrator top", "watch all nodes and jobs"),
    ),
    "launch": (
        ("master_launch train.py --lr 3e-4", "run train.py on all nodes, a rank for each GPU"),
        ("master_launch --dry-run train.py", "show what each node would run; start nothing"),
        (
            "master_launch --max-restarts 3 --nnodes 2:4 train.py",
            "go on with 2 to 4 nodes after a node, a rank or a link is lost",
        ),
    ),
    "rerun": (
        ("orchestrator rerun", "launch the newest experiment again: its code, its config"),
        ("orchestrator rerun EXP --set training.seed=2", "the same with one other setting"),
        ("orchestrator rerun EXP --env DATA=/data/b --detach", "with other data, left running"),
    ),
    "attach": (
        ("orchestrator attach", "follow the job that runs"),
        ("orchestrator attach EXP --quiet", "show its events and its end, and no log lines"),
        ("orchestrator attach EXP --steal", "take it over from another terminal"),
    ),
    "logs": (
        ("orchestrator logs -f", "show the lines of all ranks, and those to come"),
        ("orchestrator logs EXP --rank 3 -n 50", "the last 50 lines of one rank"),
        ("orchestrator logs EXP --system", "what the head and the nodes did, where a job hangs"),
    ),
    "ls": (
        ("orchestrator ls --running", "those that run; nodes --queue has what waits"),
        ("orchestrator ls --tag paper", "those with a tag"),
        ("orchestrator ls --all --json", "all of them, for a program"),
    ),
    "status": (
        ("orchestrator status", "how far the job is, and what runs on its nodes"),
        ("orchestrator status EXP --watch", "its ranks, live"),
        ("orchestrator status EXP --json", "all that is known, for a program"),
    ),
    "stop": (
        ("orchestrator stop", "have the ranks save and exit, on all nodes"),
        ("orchestrator stop EXP --grace 5m", "give them five minutes for it"),
        ("orchestrator stop EXP --now", "kill them at once"),
    ),
    "emergency-stop": (
        ("emergency_stop --dry-run", "show what would be ended"),
        ("emergency_stop", "kill every job of yours on all nodes of the list, after asking"),
        ("emergency_stop --nodes all_nodes.txt --yes", "the same on other nodes, unasked"),
    ),
    "top": (
        ("orchestrator top", "all nodes and jobs, live; ? explains the keys"),
        ("orchestrator top --once", "one look, printed"),
        ("orchestrator top --json --watch --every 10", "a line of JSON every 10 seconds"),
    ),
    "sweep": (
        ("orchestrator sweep --gpus 1 --grid lr=1e-4,3e-4 seed=0..3 -- train.py", "on a GPU each"),
        (
            "orchestrator sweep --optuna 20 'lr=log(1e-5,1e-2)' --metric acc train.py",
            "twenty values that Optuna chooses",
        ),
        ("orchestrator sweep --jobs 4 - < commands.txt", "a launch for each line, four at once"),
    ),
    "init": (
        ("orchestrator init", "choose from the machines that your ssh knows"),
        ("orchestrator init gpu1 gpu2 --yes", "these, asking nothing; gpu1 is the master"),
        ("orchestrator init 'gpu[01-08] slots=4' --nodes lab.txt", "a range, into another list"),
    ),
    "nodes": (
        ("orchestrator nodes", "what each machine of the list is"),
        ("orchestrator nodes --queue", "who holds GPUs, and who waits"),
        ("orchestrator nodes --warm off", "end the processes that --warm left there"),
    ),
    "plan": (
        ("orchestrator plan train.py", "what a launch would run on each node"),
        ("orchestrator plan --explain train.py", "where each setting comes from, and why"),
        ("orchestrator plan --set nccl.profile=ethernet train.py", "with another profile"),
    ),
    "doctor": (
        ("orchestrator doctor", "check all nodes, and how to fix what is wrong"),
        ("orchestrator doctor --quick", "only what every launch checks"),
        ("orchestrator doctor --json", "for a program"),
    ),
    "verify": (
        ("orchestrator verify", "run real collectives, and name the slow node or link"),
        ("orchestrator verify --backend gloo", "over the network of the CPUs"),
        ("orchestrator verify --json", "for a program"),
    ),
    "demo": (
        ("orchestrator demo --kill", "kill a rank and a node, and compare the losses"),
        ("orchestrator demo --size 4 --max-restarts 1", "four nodes, with options of a launch"),
        ("orchestrator demo --keep", "keep them for commands of your own"),
    ),
    "exec": (
        ("orchestrator exec nvidia-smi -L", "run a program on all nodes"),
        ("orchestrator exec -b 'df -h / | tail -1'", "shell text; equal outputs are shown once"),
        ("orchestrator exec --node 1 --timeout 10 uptime", "on one node, for 10 seconds at most"),
    ),
    "ssh": (
        ("orchestrator ssh 0", "a shell on the first node"),
        ("orchestrator ssh gpu3 --workdir /data", "a shell in a directory"),
        ("orchestrator ssh 1 -- python -m torch.utils.collect_env", "run one command there"),
    ),
    "push": (
        ("orchestrator push data/ /data/set", "copy a directory to all nodes"),
        ("orchestrator push model.pt ~/models/", "a file, into a directory there"),
        ("orchestrator push data/ /data/set --dry-run", "say what would be sent"),
    ),
    "pull": (
        ("orchestrator pull", "fetch what the newest job left on its nodes"),
        ("orchestrator pull EXP --checkpoints", "also its checkpoints"),
        ("orchestrator pull /var/log/syslog logs/", "a path of every node, into logs/node_<i>_..."),
    ),
    "bootstrap": (
        ("orchestrator bootstrap torch numpy", "give all nodes the same environment"),
        ("orchestrator bootstrap requirements.txt --name vision", "from a file, with a name"),
        ("orchestrator bootstrap", "from the uv.lock or requirements.txt here"),
    ),
    "dashboard": (
        ("orchestrator dashboard", "print the address of live pages of all experiments"),
        ("orchestrator dashboard --open", "open them in this machine's browser"),
        ("orchestrator dashboard --host 0.0.0.0 --name gpu-head", "for browsers elsewhere"),
    ),
    "report": (
        ("orchestrator report", "write a page of the newest experiment"),
        ("orchestrator report EXP1 EXP2 --out both.html", "two of them side by side"),
        ("orchestrator report EXP --open", "show it in the browser of this machine"),
    ),
    "profile": (
        ("orchestrator profile", "trace 3 steps of the job that runs"),
        ("orchestrator profile EXP --steps 5", "more of them, of one of several"),
        ("orchestrator profile traces/", "read a directory of torch.profiler's traces"),
    ),
    "track": (
        ("orchestrator track --to tensorboard", "pass the numbers of the job that runs on"),
        ("orchestrator track EXP --to wandb --set wandb.project=p", "to W&B, with an option"),
        ("orchestrator track --serve 9400", "serve http://127.0.0.1:9400/metrics to Prometheus"),
    ),
    "checkpoint": (
        ("orchestrator checkpoint ls", "the checkpoints of the newest experiment"),
        ("orchestrator checkpoint verify EXP", "compare every byte with its checksum"),
        ("orchestrator checkpoint export EXP model.safetensors", "write the weights to a file"),
    ),
    "prune": (
        ("orchestrator prune --keep 20 --dry-run", "show what would be removed"),
        ("orchestrator prune --keep 20 --older-than 14d", "remove the others, if old"),
        ("orchestrator prune --keep 5 --on-nodes", "and what their jobs left on the nodes"),
    ),
    "submit": (
        ("orchestrator submit slurm --nnodes 4 --gpus 8 train.py", "queue a job, and follow it"),
        ("orchestrator submit slurm --nnodes 4 --detach train.py", "and leave it"),
        ("orchestrator submit slurm --nnodes 2 --partition gpu train.py", "in a partition"),
    ),
    "submit slurm": (
        ("orchestrator submit slurm --nnodes 4 --gpus 8 train.py", "queue a job, and follow it"),
        ("orchestrator submit slurm --nnodes 4 --detach train.py", "and leave it"),
        ("orchestrator submit slurm --nnodes 4 --print train.py > job.sbatch", "a batch file"),
    ),
    "run-node": (
        (
            "MASTER_ADDR=10.0.0.1 NNODES=2 NODE_RANK=0 orchestrator run-node train.py",
            "on the first machine",
        ),
        (
            "MASTER_ADDR=10.0.0.1 NNODES=2 NODE_RANK=1 orchestrator run-node train.py",
            "on the second one",
        ),
        ("orchestrator run-node --wait 60 train.py", "wait a minute for the others, no longer"),
    ),
    "help": (
        ("orchestrator help", "list the topics"),
        ("orchestrator help NCCL_SOCKET_IFNAME", "search for a word"),
        ("orchestrator help launch", "the same as launch --help"),
    ),
}
