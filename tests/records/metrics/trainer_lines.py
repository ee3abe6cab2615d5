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
        loss=[(0, 3.6372), (1, 3.6456), (2, 3.6342)],
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
        "torchvision/DETR/MAE/DINO MetricLogger",
        [
            (
                "Epoch: [0]  [ 0/48]  eta: 0:01:00  lr: 0.01  img/s: 3  loss: 6.9 (6.9)  acc1: "
                "0.0 (0.0)  time: 1  data: 0.1  max mem: 0"
            ),
            (
                "Epoch: [0]  [10/48]  eta: 0:01:00  lr: 0.01  img/s: 3  loss: 6.5 (6.7)  acc1: "
                "0.0 (0.0)  time: 1"
            ),
            "Test:   [ 0/10]  eta: 0:00:01  loss: 2.2 (2.2)  acc1: 0.0",
            "Test:   [ 9/10]  eta: 0:00:00  loss: 2.1 (2.2)  acc1: 0.0",
        ],
        loss=[(0, 6.9), (10, 6.5)],
    ),
    Trainer(
        "Swin main.py",
        [
            (
                "[2026-11-24 swin] (main.py 230): INFO Train: [0/300][0/1251]\teta 0:20:00 lr 0."
                "000001\t wd 0.0500\ttime 1.0 (1.0)\tloss 6.9 (6.9)\tgrad_norm 1.2 (1.2)\t"
                "loss_scale 65536.0 (65536.0)\tmem 100MB"
            ),
            (
                "[2026-11-24 swin] (main.py 230): INFO Train: [0/300][10/1251]\teta 0:20:00 lr 0"
                ".000001\t wd 0.0500\ttime 1.0 (1.0)\tloss 6.5 (6.9)\tgrad_norm 1.2 (1.2)"
            ),
            (
                "[2026-11-24 swin] (main.py 280): INFO Test: [0/98]\tTime 1.0 (1.0)\tLoss 2.1 (2."
                "1)\tAcc@1 0.0"
            ),
            (
                "[2026-11-24 swin] (main.py 280): INFO Test: [10/98]\tTime 1.0 (1.0)\tLoss 2.0 (2"
                ".0)\tAcc@1 0.0"
            ),
        ],
        loss=[(0, 6.9), (10, 6.5)],
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
        "open_clip",
        [
            (
                "Train Epoch: 0 [  4/32 (12%)] Data (t): 0.1 Batch (t): 1.2, 3.3/s, 1.6/s/gpu L"
                "R: 0.000001 Logit Scale: 14.286 Contrastive_loss: 1.3 (1.3) Loss: 1.3863 (1.38"
                "63)"
            ),
            "Eval Epoch: 1 [4 / 16]\tClip Loss: 0.700000\t",
            (
                "Train Epoch: 1 [  4/32 (12%)] Data (t): 0.1 Batch (t): 1.2 LR: 0.000001 Contra"
                "stive_loss: 1.1 (1.1) Loss: 1.1 (1.1)"
            ),
        ],
        loss=[(4, 1.3863), (36, 1.1)],
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
        "cifar10 tutorial",
        [
            "[1,  2000] loss: 2.200",
            "[1,  4000] loss: 1.800",
        ],
        loss=[(2000, 2.2), (4000, 1.8)],
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
        "llm.c train_gpt2.py",
        [
            "val loss 10.9",
            "step    1/100 | train loss 9.5 | norm 1.2 | lr 3e-4 | (100 ms | 1000 tok/s)",
            "val loss 9.1",
            "step    2/100 | train loss 9.0 | norm 1.2",
        ],
        loss=[(1, 9.5), (2, 9.0)],
        val_loss=[(1, 9.1)],
    ),
    Trainer(
        "Keras on torch",
        [
            "Epoch 1/5",
            " 10/32 ━━━━━━━━ 1s 30ms/step - accuracy: 0.1000 - loss: 2.3000",
            (
                "32/32 ━━━━ 2s 30ms/step - accuracy: 0.5 - loss: 0.3 - val_accuracy: 0.4 - val_"
                "loss: 0.4"
            ),
        ],
        loss=[(10, 2.3), (32, 0.3)],
        val_loss=[(32, 0.4)],
    ),
    Trainer(
        "Lambda guide train_llm.py",
        [
            (
                "[rank=0] [2026] INFO:{'global_step': 10, 'lr': 3e-05, 'running_loss': 5.7, 'ep"
                "och': 0, 'epoch_progress': 0.1, 'num_batches_remaining': 90}"
            ),
        ],
        loss=[(10, 5.7)],
    ),
    Trainer(
        "picotron",
        [
            (
                "[rank 0] Step: 10    | Loss: 5.3000 | Global batch size: 4.1K | Tokens/s: 1.2K"
                " | MFU: 3.00%"
            ),
        ],
        loss=[(10, 5.3)],
    ),
    Trainer(
        "nanochat base_train",
        [
            (
                "step 00010/00020 (50.00%) | loss: 8.123456 | grad norm: 1.2 | lrm: 1.00 | dt: "
                "100.00ms | tok/sec: 5,000 | mfu: 0.00"
            ),
        ],
        loss=[(10, 8.123456)],
    ),
    Trainer(
        "modded-nanogpt",
        [
            "step:0/1390 val_loss:10.8258 train_time:0ms step_avg:0.01ms",
            "step:125/1390 val_loss:4.6 train_time:9ms step_avg:0.01ms",
        ],
        val_loss=[(0, 10.8258), (125, 4.6)],
    ),
    Trainer(
        "DiT",
        [
            "[2026] (step=0000100) Train Loss: 0.1712, Train Steps/Sec: 1.20",
        ],
        loss=[(100, 0.1712)],
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
    ),
    Trainer(
        "detectron2",
        [
            (
                "[11/24 10:00:00 d2.utils.events]:  eta: 0:10:00  iter: 19  total_loss: 1.23  l"
                "oss_cls: 0.4  loss_box_reg: 0.2  time: 0.1  lr: 0.0002  max_mem: 100M"
            ),
        ],
        loss=[(19, 1.23)],
    ),
    Trainer(
        "lingua",
        [
            (
                "0: INFO    26-11-24 10:00:00.1 - 0:00:10 - step: 10  acc: 0  loss:  8.1234  gr"
                "ad: 1.20e+00  flops: 1e12  wps: 1e4  iter: 0.1  data: 0.0  lr: 1e-4  mem: 10%"
            ),
        ],
        loss=[(10, 8.1234)],
    ),
    Trainer(
        "torchtune bar",
        [
            bar("1|12|Loss: 2.3: ", 12, 240),
        ],
        loss=[(12, 2.3)],
    ),
    Trainer(
        "DeepSpeed pipeline",
        [
            (
                "[2026] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001"
                "], mom=[[0.9, 0.99]]"
            ),
            "steps: 10 loss: 2.3026 iter time (s): 0.100 samples/sec: 160.0",
        ],
        loss=[(10, 2.3026)],
    ),
    Trainer(
        "peft examples",
        [
            bar("", 10, 10),
            (
                "epoch=0: train_ppl=tensor(3.3) train_epoch_loss=tensor(1.2) eval_ppl=tensor(2."
                "7) eval_epoch_loss=tensor(1.0)"
            ),
        ],
        loss=[(10, 1.2)],
        val_loss=[(10, 1.0)],
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
        "a VAE's example",
        [
            "Train Epoch: 1 [0/2000 (0%)]\tLoss: 550.0",
            "====> Epoch: 1 Average loss: 190.0",
            "====> Test set loss: 120.0",
            "Train Epoch: 2 [0/2000 (0%)]\tLoss: 130.0",
        ],
        loss=[(0, 550.0), (2000, 130.0)],
    ),
    Trainer(
        "diffusers",
        [
            bar("Steps: ", 10, 100, ", lr=0.0001, step_loss=0.12"),
            bar("Steps: ", 20, 100, ", lr=0.0001, step_loss=0.11"),
        ],
        loss=[(10, 0.12), (20, 0.11)],
    ),
    Trainer(
        "NeMo",
        [
            (
                "Training epoch 0, iteration 10/99 | lr: 1e-05 | global_batch_size: 8 | global_"
                "step: 10 | reduced_train_loss: 7.8 | train_step_timing in s: 1.0"
            ),
            (
                "Training epoch 1, iteration 5/99 | lr: 1e-05 | global_batch_size: 8 | global_s"
                "tep: 104 | reduced_train_loss: 7.1"
            ),
        ],
        loss=[(10, 7.8), (104, 7.1)],
    ),
    Trainer(
        "OpenRLHF",
        [
            bar("Train epoch [1/2]: ", 10, 100, ", gpt_loss=1.2, loss_mean=1.3"),
            bar("Train epoch [2/2]: ", 10, 100, ", gpt_loss=1.1, loss_mean=1.2"),
        ],
        loss=[(10, 1.2), (110, 1.1)],
    ),
    Trainer(
        "GPT-NeoX",
        [
            (
                " samples/sec: 10.1 | iteration       10/  320000 | elapsed time per iteration "
                "(ms): 99.0 | learning rate: 1.0E-05 | approx flops per GPU: 1.0TFLOPS | lm_los"
                "s: 1.05E+01 | loss scale: 1.0 | number of skipped iterations:   0 |"
            ),
        ],
        loss=[(10, 10.5)],
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
        "batches of epochs whose length nobody says",
        [
            "[1, 2000] loss: 2.2",
            "[2, 2000] loss: 1.5",
        ],
        loss=[(2000, 2.2)],
    ),
    Trainer(
        "ESPnet, whose batches have a range in place of a number",
        [
            "[h] 2026-11-24 (trainer:762) INFO: 1epoch:train:1-50batch: iter_time=0.1,"
            " loss_ctc=100.1,"
            " loss_att=50.2, acc=0.1, loss=60.300, optim0_lr0=1.000e-04, train_time=1.0",
            "[h] 2026-11-24 (trainer:365) INFO: 1epoch results: [train] iter_time=0.1, loss=60.300,"
            " total_count=50, [valid] loss_ctc=90.1, loss=50.200, total_count=9",
        ],
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
        "fastai, whose losses stand below their names",
        [
            "epoch     train_loss  valid_loss  accuracy  time    ",
            "0         0.512345    0.412345    0.850000  00:10     ",
            "Epoch 2/5 : |█████-----| 45.45% [10/22 00:03<00:03 0.5123]",
        ],
    ),
    Trainer(
        "catalyst",
        [
            bar("1/5 * Epoch (train): ", 10, 10, ", loss=0.500, lr=0.001"),
            bar("1/5 * Epoch (valid): ", 4, 4, ", loss=0.400"),
            "train (1/5) loss: 0.45 | lr: 0.001",
            "valid (1/5) loss: 0.41",
            "* Epoch (1/5) lr: 0.001 | momentum: 0.9",
            bar("2/5 * Epoch (train): ", 5, 10, ", loss=0.300, lr=0.001"),
        ],
        loss=[(10, 0.5), (15, 0.3)],
    ),
    Trainer(
        "PaddleDetection",
        [
            "[11/24 10:00:00] ppdet.engine INFO: Epoch: [0] [ 20/500] learning_rate: 0.000100"
            " loss_xy:"
            " 0.5 loss_wh: 1.2 loss: 12.300 eta: 1:00:00 batch_cost: 0.5 data_cost: 0.1 ips:"
            " 16.0 im",
            "[11/24 10:00:00] ppdet.engine INFO: Eval iter: 100",
            "[11/24 10:00:00] ppdet.engine INFO: Epoch: [1] [ 20/500] learning_rate: 0.000100"
            " loss_xy:"
            " 0.4 loss_wh: 1.1 loss: 10.100 eta: 1:00:00 batch_cost: 0.5",
        ],
        loss=[(20, 12.3), (520, 10.1)],
    ),
    Trainer(
        "PaddleOCR",
        [
            "[2026/11/24] ppocr INFO: epoch: [1/500], global_step: 10, lr: 0.000100, acc: 0.1,"
            " CTCLoss: 10.1, NRTRLoss: 9.0, loss: 20.200, avg_reader_cost: 0.1 s",
            "[2026/11/24] ppocr INFO: epoch: [2/500], global_step: 110, lr: 0.000100, acc: 0.1,"
            " CTCLoss: 9.1, NRTRLoss: 8.0, loss: 18.200, avg_reader_cost: 0.1 s",
        ],
        loss=[(10, 20.2), (110, 18.2)],
    ),
    Trainer(
        "DINOv2",
        [
            "I20261124 10:00:00 9 dinov2 helpers.py:103] Training  [   10/12500]  eta: 1:00:00  lr:"
            " 0.0001 (0.0001)  wd: 0.0400 (0.0400)  dino_local_crops_loss: 5.2 (5.4) "
            " total_loss: 10.5"
            " (11.0)  time: 0.5  data: 0.1",
        ],
        loss=[(10, 10.5)],
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
        "mmcv's runner",
        [
            "2026-11-24 - mmdet - INFO - Epoch [1][50/7330]\tlr: 1.978e-03, eta: 1 day, 1:00:00,"
            " time: 0.5, data_time: 0.1, memory: 9, loss_cls: 0.5, loss_bbox: 0.3, loss: 1.3000",
            "2026-11-24 - mmdet - INFO - Epoch(val) [1][4952]\tbbox_mAP: 0.1000",
            "2026-11-24 - mmdet - INFO - Epoch [2][50/7330]\tlr: 1.978e-03, eta: 1 day, 1:00:00,"
            " time: 0.5, data_time: 0.1, memory: 9, loss_cls: 0.4, loss_bbox: 0.2, loss: 1.1000",
        ],
        loss=[(50, 1.3), (7380, 1.1)],
    ),
    Trainer(
        "YOLOX",
        [
            "2026-11-24 | INFO | yolox.core.trainer:270 - epoch: 1/300, iter: 10/100, gpu mem: 9Mb,"
            " iter_time: 0.5s, data_time: 0.0s, total_loss: 10.5, iou_loss: 3.2, conf_loss: 5.1,"
            " lr:"
            " 1.0e-05, size: 640, ETA: 1:00:00",
            "2026-11-24 | INFO | yolox.core.trainer:270 - epoch: 2/300, iter: 10/100, gpu mem: 9Mb,"
            " iter_time: 0.5s, data_time: 0.0s, total_loss: 9.5, iou_loss: 3.2, conf_loss: 5.1",
        ],
        loss=[(10, 10.5), (110, 9.5)],
    ),
    Trainer(
        "WeNet",
        [
            "2026-11-24 10:00:00,123 DEBUG TRAIN | steps/sec 2.100| Batch 0/100 loss 50.123456"
            " loss_att 60.100000 loss_ctc 30.200000 lr 1.0000e-05 grad_norm 5.123456 rank 0",
            "2026-11-24 10:00:00,123 DEBUG CV | steps/sec 3.000| Batch 0/50 loss 40.100000 acc 0.1",
            "2026-11-24 10:00:00,123 DEBUG TRAIN | steps/sec 2.100| Batch 0/200 loss 45.123456"
            " loss_att 60.100000 loss_ctc 30.200000 lr 1.0000e-05 grad_norm 5.123456 rank 0",
        ],
        loss=[(100, 50.123456), (200, 45.123456)],
    ),
    Trainer(
        "verl",
        [
            "step:1 - global_seqlen/min:100 - actor/entropy_loss:0.5 - actor/pg_loss:0.01 -"
            " actor/kl_loss:0.001 - critic/score/mean:0.2 - training/global_step:1",
            "step:2 - global_seqlen/min:100 - actor/entropy_loss:0.4 - actor/pg_loss:0.02 -"
            " critic/vf_loss:3.0 - critic/score/mean:0.2 - training/global_step:2",
        ],
        loss=[(1, 0.01), (2, 0.02)],
    ),
    Trainer(
        "RSL-RL",
        [
            "                       Learning iteration 10/1500                       ",
            "                 Mean value_function loss: 0.0123",
            "                      Mean surrogate loss: -0.0100",
            "                        Mean entropy loss: 0.5000",
        ],
        loss=[(10, -0.01)],
    ),
    Trainer(
        "OpenNMT, which prints a cross entropy",
        [
            "[2026-11-24 INFO] Step 50/100000; acc: 5.1; ppl: 9000.0; xent: 9.1; lr: 0.00001;"
            " sents: 9"
        ],
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
        "transformers 5, in strings",
        [
            bar("", 10, 25),
            "{'loss': '2.5', 'grad_norm': '1.1', 'learning_rate': '5e-05', 'epoch': '0.4'}",
            "{'eval_loss': '2.2', 'eval_runtime': '1.0', 'epoch': '0.4'}",
        ],
        loss=[(10, 2.5)],
        val_loss=[(10, 2.2)],
    ),
    Trainer(
        "ms-swift",
        [
            bar("Train: ", 5, 100),
            "{'loss': 1.5, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'token_acc': 0.6, 'epoch':"
            " 0.05,"
            " 'global_step/max_steps': '5/100', 'percentage': '5.00%', 'elapsed_time': '10s'}",
            "{'eval_loss': 1.4, 'eval_runtime': 1.0, 'epoch': 0.05, 'global_step/max_steps':"
            " '5/100'}",
        ],
        loss=[(5, 1.5)],
        val_loss=[(5, 1.4)],
    ),
    Trainer(
        "Lightning's rich bar",
        [
            "Epoch 0/4  ━━━━━━╸━━━━━━━ 10/100 0:00:01 • 0:00:10 12.00it/s v_num: 0.000"
            " train_loss: 0.5",
            "Epoch 1/4  ━━━━━━╸━━━━━━━ 10/100 0:00:01 • 0:00:10 12.00it/s v_num: 0.000"
            " train_loss: 0.4",
        ],
        loss=[(10, 0.5), (110, 0.4)],
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
    Trainer(
        "torchrl and CleanRL, which print returns",
        [
            "global_step=512, episodic_return=20.0",
            "SPS: 1000",
            "global_step=900, episodic_return=21.0",
        ],
    ),
    Trainer(
        "BasicSR, whose losses have names of their own",
        [
            "2026-11-24 INFO: [EDVR_..][epoch:  0, iter:     100, lr:(4.000e-04,)] [eta: 1 day,"
            " 1:00:00, time (data): 0.500 (0.002)] l_pix: 2.0e-02",
        ],
    ),
    Trainer(
        "SpeechBrain",
        [
            bar("", 10, 100, ", train_loss=2.5"),
            bar("", 100, 100, ", train_loss=2.1"),
            bar("", 20, 20),
            "speechbrain.utils.train_logger - epoch: 1, lr: 1.00e+00 - train loss: 2.10 - valid"
            " loss:"
            " 1.90, valid PER: 20.50",
            bar("", 10, 100, ", train_loss=1.8"),
        ],
        loss=[(10, 2.5), (100, 2.1), (110, 1.8)],
        val_loss=[(100, 1.9)],
    ),
]
