"""Lines that well-known trainers print, and the curves that they say."""

from __future__ import annotations

from dataclasses import dataclass, field

Curve = list[tuple[int, float]]


def bar(words: str, done: int, total: int, more: str = "") -> str:
    """Return a line as tqdm draws it."""
    return (
        f"{words}{100 * done // total:3d}%|{'#' * 10}| {done}/{total} [00:01<00:02, 1.2it/s{more}]"
    )


@dataclass(frozen=True)
class Trainer:
    name: str
    lines: list[str]
    loss: Curve = field(default_factory=list)
    val_loss: Curve = field(default_factory=list)


TRAINERS = [
    Trainer(
        "nanoGPT",
        [
            "step 0: train loss 3.6485, val loss 3.6500",
            "iter 0: loss 3.6372, time 91.80ms, mfu -100.00%",
            "iter 1: loss 3.6456, time 9ms, mfu 0%",
            "step 2: train loss 3.6211, val loss 3.6171",
            "iter 2: loss 3.6342, time 9ms, mfu 0%",
        ],
        loss=[(0, 3.6485), (1, 3.6456), (2, 3.6211)],
        val_loss=[(0, 3.65), (2, 3.6171)],
    ),
    Trainer(
        "pytorch/examples imagenet main.py",
        [
            (
                "Epoch: [0][  1/313]\tTime  0.9 ( 0.9)\tData  0.1 ( 0.1)\tLoss 7.0000e+00 (7.0000e"
                "+00)\tAcc@1   0.00 (  0.00)"
            ),
            (
                "Epoch: [0][ 11/313]\tTime  0.9 ( 0.9)\tData  0.1 ( 0.1)\tLoss 6.5000e+00 (6.8e+00"
                ")\tAcc@1   0.00 (  0.00)"
            ),
            "Test: [ 1/13]\tTime  0.4 ( 0.4)\tLoss 2.2000e+00 (2.2e+00)\tAcc@1   0.00 (  0.00)",
            "Test: [11/13]\tTime  0.4 ( 0.4)\tLoss 2.1000e+00 (2.2e+00)\tAcc@1",
            (
                "Epoch: [1][  1/313]\tTime  0.9 ( 0.9)\tData  0.1 ( 0.1)\tLoss 6.0000e+00 (6.0e+00"
                ")\tAcc@1"
            ),
        ],
        loss=[(1, 7.0), (11, 6.5), (314, 6.0)],
    ),
    Trainer(
        "timm train.py",
        [
            (
                "Train: 0 [   0/1251 (  0%)]  Loss: 6.95 (6.95)  Time: 1.2s, 3/s  LR: 1.000e-05"
                "  Data: 1.0"
            ),
            (
                "Train: 0 [  50/1251 (  4%)]  Loss: 6.50 (6.7)  Time: 1.2s, 3/s  LR: 1.000e-05 "
                " Data: 1.0"
            ),
            "Test: [   0/48]  Time: 0.9 (0.9)  Loss:   2.10 ( 2.10)  Acc@1:  0.000",
            "Test: [  48/48]  Time: 0.9 (0.9)  Loss:   2.00 ( 2.05)  Acc@1:  0.000",
            (
                "Train: 1 [   0/1251 (  0%)]  Loss: 6.10 (6.10)  Time: 1.2s, 3/s  LR: 1.000e-05"
                "  Data: 1.0"
            ),
        ],
        loss=[(0, 6.95), (50, 6.5), (1251, 6.1)],
    ),
    Trainer(
        "transformers, and the mean of the run",
        [
            bar("", 10, 25),
            "{'loss': 2.5, 'grad_norm': 1.1, 'learning_rate': 5e-05, 'epoch': 0.4}",
            bar("", 20, 25),
            "{'loss': 1.5, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.8}",
            bar("", 25, 25),
            (
                "{'train_runtime': 12.3, 'train_samples_per_second': 1.2, 'train_steps_per_seco"
                "nd': 2.0, 'train_loss': 1.9, 'epoch': 1.0}"
            ),
        ],
        loss=[(10, 2.5), (20, 1.5)],
    ),
    Trainer(
        "transformers, with the bar of an evaluation",
        [
            bar("", 10, 20),
            "{'loss': 2.5, 'grad_norm': 1.1, 'learning_rate': 5e-05, 'epoch': 0.5}",
            bar("", 1, 4),
            bar("", 4, 4),
            (
                "{'eval_loss': 2.2, 'eval_runtime': 1.0, 'eval_samples_per_second': 2.0, 'epoch"
                "': 0.5}"
            ),
            bar("", 20, 20),
            "{'loss': 1.5, 'grad_norm': 1.1, 'learning_rate': 0.0, 'epoch': 1.0}",
        ],
        loss=[(10, 2.5), (20, 1.5)],
        val_loss=[(10, 2.2)],
    ),
    Trainer(
        "steps that go on from epoch to epoch",
        [
            "epoch 1 step 90/200 loss 2.0",
            "epoch 1 step 100/200 loss 1.9",
            "epoch 2 step 110/200 loss 1.8",
            "epoch 2 step 200/200 loss 1.5",
        ],
        loss=[(90, 2.0), (100, 1.9), (110, 1.8), (200, 1.5)],
    ),
    Trainer(
        "OLMo-core console logger",
        [
            "[step=90/200,epoch=1]",
            "    train/CE loss=2.0",
            "[step=110/200,epoch=2]",
            "    train/CE loss=1.8",
        ],
        loss=[(90, 2.0), (110, 1.8)],
    ),
    Trainer(
        "MNIST example",
        [
            "Train Epoch: 1 [0/2000 (0%)]\tLoss: 2.300000",
            "Train Epoch: 1 [640/2000 (32%)]\tLoss: 2.200000",
            "",
            "Test set: Average loss: 0.5000, Accuracy: 400/500 (80%)",
            "Train Epoch: 2 [0/2000 (0%)]\tLoss: 2.100000",
        ],
        loss=[(0, 2.3), (640, 2.2), (2000, 2.1)],
    ),
    Trainer(
        "mmengine",
        [
            (
                "11/24 - mmengine - INFO - Epoch(train)  [1][ 50/500]  lr: 1.0000e-02  eta: 0:1"
                "0:00  time: 0.1  loss: 2.3  loss_cls: 1.1"
            ),
            (
                "11/24 - mmengine - INFO - Epoch(train)  [2][ 50/500]  lr: 1.0000e-02  eta: 0:1"
                "0:00  time: 0.1  loss: 1.3  loss_cls: 1.1"
            ),
        ],
        loss=[(50, 2.3), (550, 1.3)],
    ),
    Trainer(
        "dcgan",
        [
            "[0/25][0/1583] Loss_D: 1.7 Loss_G: 5.2 D(x): 0.5",
            "[0/25][50/1583] Loss_D: 0.7 Loss_G: 6.2 D(x): 0.5",
            "[1/25][0/1583] Loss_D: 0.6 Loss_G: 6.2 D(x): 0.5",
        ],
        loss=[(0, 1.7), (50, 0.7), (1583, 0.6)],
    ),
    Trainer(
        "composer ProgressBar off",
        [
            "[batch=10/100]:",
            "\t Train time/batch: 9",
            "\t Train loss/train/total: 2.3000",
            "[batch=20/100]:",
            "\t Train loss/train/total: 2.1",
        ],
        loss=[(10, 2.3), (20, 2.1)],
    ),
    Trainer(
        "Lightning bar",
        [
            bar("Epoch 0: ", 5, 10, ", v_num=0, train_loss=0.5"),
            bar("Epoch 0: ", 10, 10, ", v_num=0, train_loss=0.4"),
            bar("Validation DataLoader 0: ", 1, 2),
            bar("Epoch 1: ", 5, 10, ", v_num=0, train_loss=0.3, val_loss=0.45"),
        ],
        loss=[(5, 0.5), (10, 0.4), (15, 0.3)],
        val_loss=[(15, 0.45)],
    ),
    Trainer(
        "PyTorch-GAN",
        [
            "[Epoch 0/200] [Batch 5/938] [D loss: 0.5] [G loss: 0.7]",
            "[Epoch 1/200] [Batch 5/938] [D loss: 0.4] [G loss: 0.8]",
        ],
        loss=[(5, 0.5), (943, 0.4)],
    ),
    Trainer(
        "a bar for each epoch, without words",
        [
            bar("", 10, 10, ", loss=0.9"),
            bar("", 5, 10, ", loss=0.8"),
            bar("", 10, 10, ", loss=0.7"),
        ],
        loss=[(10, 0.9), (15, 0.8), (20, 0.7)],
    ),
    Trainer(
        "what is best so far",
        [
            "step 5 loss 0.5 best_loss 0.4",
            "best val loss 0.3",
            "step 6 best loss: 0.4 loss_scale: 65536",
        ],
        loss=[(5, 0.5)],
    ),
    Trainer(
        "a data set that is mapped before the training",
        [
            bar("Map: ", 500, 500),
            bar("", 7, 7),
            bar("", 10, 25),
            "{'loss': 2.5, 'epoch': 0.4}",
        ],
        loss=[(10, 2.5)],
    ),
    Trainer(
        "sd-scripts of kohya",
        [
            "epoch 1/10",
            bar("steps: ", 10, 100, ", avr_loss=0.12"),
            bar("validation steps: ", 5, 8, ", val_avg_loss=0.2, timestep=400"),
            "epoch 2/10",
            bar("steps: ", 11, 100, ", avr_loss=0.11"),
        ],
        loss=[(10, 0.12), (11, 0.11)],
    ),
    Trainer(
        "ultralytics, whose losses stand below their names",
        [
            "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size",
            "      1/100      2.5G      1.234      2.345      1.111         16        640: 45%"
            " ━━━━━╸────── 10/22 3.2it/s 3.1s<3.7s",
            "                 Class     Images  Instances      Box(P          R      mAP50): 100%"
            " ━━━━━━━━━━━━ 4/4 3.2it/s 1.3s",
        ],
    ),
    Trainer(
        "mmengine by iterations",
        [
            "11/24 - mmengine - INFO - Iter(train) [    50/160000]  base_lr: 1.0000e-02 lr:"
            " 1.0000e-02"
            "  eta: 0:10:00  time: 0.1  memory: 9  loss: 2.5  decode.loss_ce: 1.5  aux.loss_ce:"
            " 1.0",
            "11/24 - mmengine - INFO - Iter(val) [250/250]    eta: 0:10:00  val/loss: 2.2",
            "11/24 - mmengine - INFO - Iter(train) [   100/160000]  base_lr: 1.0000e-02 lr:"
            " 1.0000e-02"
            "  eta: 0:10:00  time: 0.1  memory: 9  loss: 2.4  decode.loss_ce: 1.5  aux.loss_ce:"
            " 1.0",
        ],
        loss=[(50, 2.5), (100, 2.4)],
    ),
    Trainer(
        "ignite",
        [
            "Epoch [1/10]: [5/938]   1%|▏         , loss=2.3 [00:01<00:30]",
            "Epoch [2/10]: [5/938]   1%|▏         , loss=1.3 [00:01<00:30]",
        ],
        loss=[(5, 2.3), (943, 1.3)],
    ),
    Trainer(
        "composer, whose evaluation counts batches of its own",
        [
            "[batch=10/100]:",
            "\t Train loss/train/total: 2.3000",
            "[Eval batch=5/50] Eval on eval data:",
            "\t Eval metrics/eval/LanguageCrossEntropy: 2.2000",
            "\t Train loss/train/total: 2.3000",
        ],
        loss=[(10, 2.3)],
    ),
]
