"""Lines that well-known trainers print, and the curves that they say."""

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
    Trainer(
        "pytorch/examples minGPT-ddp",
        [
            "[RANK0] Epoch 1 | Iter 0 | Train Loss 4.10000",
            "[RANK0] Epoch 1 | Iter 100 | Train Loss 3.10000",
            "[RANK0] Epoch 1 | Iter 0 | Eval Loss 3.00000",
            "[RANK0] Epoch 2 | Iter 0 | Train Loss 2.90000",
            "[RANK0] Epoch 2 | Iter 100 | Train Loss 2.80000",
            "[RANK0] Epoch 2 | Iter 0 | Eval Loss 2.70000",
            "[RANK0] Epoch 3 | Iter 0 | Train Loss 2.60000",
        ],
        loss=[(0, 4.1), (100, 3.1), (200, 2.9), (300, 2.8), (400, 2.6)],
        val_loss=[(100, 3.0), (300, 2.7)],
    ),
    Trainer(
        "MONAI unet_training_ddp",
        [
            "epoch 1/2",
            "1/5, train_loss: 0.9100",
            "2/5, train_loss: 0.9000",
            "epoch 1 average loss: 0.9050",
            "epoch 2/2",
            "1/5, train_loss: 0.8000",
            "epoch 2 average loss: 0.8100",
        ],
        loss=[(1, 0.91), (2, 0.9), (6, 0.8)],
    ),
    Trainer(
        "PyG gcn",
        [
            "Epoch: 001, Loss: 1.2000, Train: 0.50, Val: 0.40, Test: 0.30",
            "Epoch: 002, Loss: 1.1000, Train: 0.60, Val: 0.50, Test: 0.40",
        ],
        loss=[(1, 1.2), (2, 1.1)],
    ),
    Trainer(
        "diffusers",
        [
            "Steps:   3%|##########| 3/100 [00:01<00:02, 1.2it/s, lr=1e-5, step_loss=0.123]",
            "Steps:   4%|##########| 4/100 [00:01<00:02, 1.2it/s, lr=1e-5, step_loss=0.111]",
        ],
        loss=[(3, 0.123), (4, 0.111)],
    ),
    Trainer(
        "mmengine, its evaluation",
        [
            (
                "2026/11/28 08:00:00 - mmengine - INFO - Epoch(train) [1][50/100]  lr: 2.0e-02  "
                "loss: 2.3000  loss_cls: 1.1"
            ),
            (
                "2026/11/28 08:00:00 - mmengine - INFO - Epoch(val) [1][10/20]    eta: 0:00:01  "
                "time: 0.1  loss: 9.9"
            ),
            (
                "2026/11/28 08:00:00 - mmengine - INFO - Epoch(train) [2][50/100]  lr: 2.0e-02  "
                "loss: 2.0000  loss_cls: 1.0"
            ),
        ],
        loss=[(50, 2.3), (150, 2.0)],
    ),
    Trainer(
        "trl DPO",
        [
            " 25%|##########| 1/4 [00:01<00:02, 1.2it/s]",
            (
                "{'loss': 0.6931, 'grad_norm': 2.1, 'learning_rate': 1e-06, 'rewards/chosen': "
                "0.0, 'logps/chosen': -33.1, 'epoch': 0.1}"
            ),
            " 50%|##########| 2/4 [00:01<00:02, 1.2it/s]",
            "{'loss': 0.6800, 'rewards/chosen': 0.1, 'epoch': 0.2}",
        ],
        loss=[(1, 0.6931), (2, 0.68)],
    ),
    Trainer(
        "trl GRPO",
        [
            " 25%|##########| 1/4 [00:01<00:02, 1.2it/s]",
            (
                "{'loss': 0.0, 'grad_norm': 0.5, 'reward': 0.3, 'completion_length': 120.0, "
                "'kl': 0.0, 'epoch': 0.1}"
            ),
        ],
        loss=[(1, 0.0)],
    ),
    Trainer(
        "levanter",
        [
            (
                "completed step: 5, seconds: 1.234, TFLOP/s/device: 100.1, total_weights: 4096, "
                "loss: 10.812"
            ),
            "eval metrics after step: 5, loss=10.4, total_weights=4096",
        ],
        loss=[(5, 10.812)],
    ),
    Trainer(
        "fastai",
        [
            "epoch     train_loss  valid_loss  accuracy  time",
            "0         0.500000    0.400000    0.900000  00:10",
        ],
    ),
    Trainer(
        "XGBoost",
        [
            "[0]\ttrain-rmse:0.50000\teval-rmse:0.60000",
        ],
    ),
    Trainer(
        "spaCy",
        [
            "E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  SCORE",
            "  0       0          0.00     50.00    0.00    0.00",
        ],
    ),
    Trainer(
        "SpeechBrain",
        [
            "epoch: 1, lr: 1.0e-03 - train loss: 3.20 - valid loss: 2.50, valid PER: 50.1",
            "epoch: 2, lr: 1.0e-03 - train loss: 2.20 - valid loss: 2.10, valid PER: 40.1",
        ],
        loss=[(1, 3.2), (2, 2.2)],
        val_loss=[(1, 2.5), (2, 2.1)],
    ),
    Trainer(
        "SpeechBrain below its bars",
        [
            "100%|##########| 10/10 [00:01<00:02, 1.2it/s, train_loss=3.3]",
            "100%|##########| 5/5 [00:01<00:02, 1.2it/s]",
            "epoch: 1, lr: 1.0e-03 - train loss: 3.20 - valid loss: 2.50, valid PER: 50.1",
            "100%|##########| 10/10 [00:01<00:02, 1.2it/s, train_loss=2.3]",
        ],
        loss=[(10, 3.3)],
        val_loss=[(10, 2.5)],
    ),
    Trainer(
        "ESPnet",
        [
            (
                "[host:0/2] 2026-11-28 08:00:00,000 (trainer:338) INFO: 1epoch results: [train] "
                "iter_time=1e-03, loss_ctc=100.1, loss=70.3, [valid] loss_ctc=90.1, loss=60.3, "
                "acc=0.5"
            ),
            (
                "[host:0/2] 2026 (trainer:800) INFO: 2epoch:train:1-100batch: iter_time=0.001, "
                "loss_ctc=80.0, loss=65.5"
            ),
        ],
    ),
    Trainer(
        "NeMo",
        [
            (
                "Epoch 0:  10%|##########| 10/100 [00:01<00:02, 1.2it/s, v_num=0, "
                "reduced_train_loss=9.500, global_step=9.000, consumed_samples=80.0, "
                "val_loss=9.60]"
            ),
            (
                "Epoch 0:  20%|##########| 20/100 [00:01<00:02, 1.2it/s, v_num=0, "
                "reduced_train_loss=9.400, global_step=19.00, consumed_samples=80.0, "
                "val_loss=9.60]"
            ),
            (
                "Epoch 1:  10%|##########| 10/100 [00:01<00:02, 1.2it/s, v_num=0, "
                "reduced_train_loss=9.300, global_step=9.000, consumed_samples=80.0, "
                "val_loss=9.50]"
            ),
        ],
        loss=[(10, 9.5), (20, 9.4), (110, 9.3)],
        val_loss=[(10, 9.6), (110, 9.5)],
    ),
    Trainer(
        "GPT-NeoX",
        [
            (
                " samples/sec: 10.1 | iteration       10/     100 | elapsed time per iteration "
                "(ms): 100.1 | learning rate: 6.0e-05 | lm_loss: 9.123000E+00 | loss scale: 1.0 |"
            ),
            (
                " validation results at iteration 10 | lm_loss value: 9.100000E+00 | lm_loss_ppl "
                "value: 8.9E+03 |"
            ),
        ],
        loss=[(10, 9.123)],
    ),
    Trainer(
        "torchvision references with EMA",
        [
            (
                "Epoch: [0]  [ 0/48]  eta: 0:01:00  lr: 0.01  img/s: 3  loss: 6.9000 (6.9000)  "
                "acc1: 0.0 (0.0)"
            ),
            "Epoch: [0] Total time: 0:00:10",
            "Test: EMA [ 0/10]  eta: 0:00:01  loss: 2.2 (2.2)  acc1: 0.0",
            "Epoch: [1]  [ 0/48]  eta: 0:01:00  lr: 0.01  loss: 5.9000 (5.9000)",
        ],
        loss=[(0, 6.9), (48, 5.9)],
    ),
    Trainer(
        "SAM 2",
        [
            (
                "INFO 2026 train_utils.py: 270: Train Epoch: [0][10/100] | Batch Time: 1.0 (1.0) "
                "| Losses/train_all_loss: 3.1e+00 (3.5e+00)"
            ),
        ],
        loss=[(10, 3.1)],
    ),
    Trainer(
        "DINOv2",
        [
            (
                "I20261128 1 dinov2 helpers.py:102] Training  [  10/1250]  eta: 0:20:00  lr: "
                "0.0001 (0.0001)  total_loss: 11.5000 (11.8000)  dino_local_crops_loss: 9.5 (9.6)"
            ),
        ],
        loss=[(10, 11.5)],
    ),
    Trainer(
        "JSON lines",
        [
            '{"step": 1, "loss": 2.5, "lr": 0.1}',
            '{"step": 2, "loss": 2.25, "lr": 0.1}',
            '{"step": 2, "val/loss": 2.75}',
            '{"step": 3, "loss": 2.75, "split": "val"}',
        ],
        loss=[(1, 2.5), (2, 2.25)],
        val_loss=[(2, 2.75)],
    ),
    Trainer(
        "logfmt",
        [
            "ts=2026-11-28T08:00:00Z level=info msg=step step=1 loss=2.5 lr=0.1",
            "level=info msg=eval step=2 loss=2.75",
            "step=3 loss=2.75 phase=val lr=0.1",
        ],
        loss=[(1, 2.5)],
    ),
    Trainer(
        "a dict of W&B's names",
        [
            "{'train/loss': 2.5, 'train/global_step': 1}",
            "{'train/loss': 2.25, 'train/global_step': 2}",
            "{'eval/loss': 2.75, 'train/global_step': 2}",
        ],
        loss=[(1, 2.5), (2, 2.25)],
        val_loss=[(2, 2.75)],
    ),
    Trainer(
        "a tensor of one",
        [
            "step 2 loss tensor([2.2500])",
        ],
        loss=[(2, 2.25)],
    ),
    Trainer(
        "thousands",
        [
            "Step 1,000 | loss=2.50",
            "Step 2,000 | loss=2.25",
            "step 3k loss 2.0",
        ],
        loss=[(1000, 2.5), (2000, 2.25)],
    ),
    Trainer(
        "best so far",
        [
            "step 1 loss 2.5 best 2.5",
            "step 2 loss 2.75 (best loss 2.5)",
        ],
        loss=[(1, 2.5), (2, 2.75)],
    ),
    Trainer(
        "a resume",
        [
            "Resuming from step 100, loss: 2.5",
            "loaded checkpoint (step 90, loss 2.6)",
            "step 101 loss 2.4",
        ],
        loss=[(101, 2.4)],
    ),
    Trainer(
        "a config",
        [
            "config: steps=100 loss=cross_entropy label_smoothing=0.1 aux_loss_weight=0.01",
            "args: Namespace(step=5, loss='mse', loss_weight=0.5)",
            "step 1 loss 2.5",
        ],
        loss=[(1, 2.5)],
    ),
    Trainer(
        "Flower",
        [
            "INFO :      fit progress: (1, 2.305, {'accuracy': 0.1}, 12.3)",
            "Round 2/10: train_loss=2.1, val_loss=2.2",
        ],
        loss=[(2, 2.1)],
        val_loss=[(2, 2.2)],
    ),
    Trainer(
        "ignite batch loss",
        [
            "Epoch [1/5]: [10/100]  10%|█         , batch loss=2.3 [00:01<00:09]",
            "Epoch [1/5]: [20/100]  20%|██        , batch loss=2.1 [00:02<00:08]",
        ],
        loss=[(10, 2.3), (20, 2.1)],
    ),
    Trainer(
        "detectron2",
        [
            (
                "[11/28 10:00:00 d2.utils.events]:  eta: 0:10:00  iter: 19  total_loss: 1.23  "
                "loss_cls: 0.4  validation_loss: 1.5  time: 0.1  lr: 0.0002"
            ),
        ],
        loss=[(19, 1.23)],
        val_loss=[(19, 1.5)],
    ),
    Trainer(
        "sentence-transformers without bars",
        [
            "{'loss': 0.9, 'grad_norm': 3.1, 'learning_rate': 1e-05, 'epoch': 0.5}",
        ],
    ),
    Trainer(
        "run_clm.py, its tables",
        [
            " 83%|##########| 10/12 [00:01<00:02, 1.2it/s]",
            "{'loss': 3.9, 'epoch': 0.8}",
            "100%|##########| 12/12 [00:01<00:02, 1.2it/s]",
            "***** train metrics *****",
            "  epoch                    =        1.0",
            "  total_flos               =      123GF",
            "  train_loss               =     3.9015",
            "  train_runtime            = 0:00:12.30",
            "***** eval metrics *****",
            "  eval_loss                =     3.5000",
        ],
        loss=[(10, 3.9)],
    ),
    Trainer(
        "Lightning with rich",
        [
            ("Epoch 2/2 ━━━━━━━━━━━━━━━━ 8/8 0:00:00 • 0:00:00 20.00it/s v_num: 0 train_loss: 0.4"),
        ],
        loss=[(24, 0.4)],
    ),
    Trainer(
        "Lightning's test",
        [
            "step 5 loss 0.5",
            "        test_loss           0.30000",
            "│         test_loss         │    0.3000000119     │",
        ],
        loss=[(5, 0.5)],
    ),
    Trainer(
        "W&B's summary",
        [
            "step 5 loss 0.5",
            "wandb: val_loss 0.3",
            "wandb:     loss 0.2",
        ],
        loss=[(5, 0.5)],
    ),
    Trainer(
        "Keras 3",
        [
            "Epoch 1/2",
            "100/100 ━━━━━━━━━━━━━━━━━━━━ 3s 5ms/step - loss: 0.5000 - val_loss: 0.4",
            "Epoch 2/2",
            " 50/100 ━━━━━━━━━━━━━━━━━━━━ 1s 5ms/step - loss: 0.4500",
            "100/100 ━━━━━━━━━━━━━━━━━━━━ 3s 5ms/step - loss: 0.4000 - val_loss: 0.3",
        ],
        loss=[(100, 0.5), (150, 0.45), (200, 0.4)],
        val_loss=[(100, 0.4), (200, 0.3)],
    ),
    Trainer(
        "Keras without bars",
        [
            "Epoch 1/2",
            (
                "100/100 - 3s - 5ms/step - accuracy: 0.5 - loss: 0.5000 - val_accuracy: 0.5 - "
                "val_loss: 0.4"
            ),
            "Epoch 2/2",
            (
                "100/100 - 3s - 5ms/step - accuracy: 0.5 - loss: 0.4000 - val_accuracy: 0.5 - "
                "val_loss: 0.3"
            ),
        ],
        loss=[(100, 0.5), (200, 0.4)],
        val_loss=[(100, 0.4), (200, 0.3)],
    ),
    Trainer(
        "pytorch quickstart",
        [
            "Epoch 1",
            "-------------------------------",
            "loss: 2.303494  [   64/60000]",
            "loss: 2.294637  [ 6464/60000]",
            "Test Error: ",
            " Accuracy: 37.1%, Avg loss: 2.150000 ",
            "",
            "Epoch 2",
            "-------------------------------",
            "loss: 2.170000  [   64/60000]",
        ],
        loss=[(64, 2.303494), (6464, 2.294637), (60064, 2.17)],
    ),
    Trainer(
        "pytorch transfer learning",
        [
            "Epoch 0/24",
            "----------",
            "train Loss: 0.5900 Acc: 0.69",
            "val Loss: 0.2900 Acc: 0.89",
            "Epoch 1/24",
            "train Loss: 0.4900 Acc: 0.69",
        ],
    ),
    Trainer(
        "pytorch cifar10",
        [
            "[1,  2000] loss: 2.173",
            "[1,  4000] loss: 1.850",
            "[2,  2000] loss: 1.250",
        ],
    ),
    Trainer(
        "word_language_model",
        [
            (
                "| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 10.00 | loss  7.63 | "
                "ppl  2000.00"
            ),
            (
                "| epoch   1 |   400/ 2983 batches | lr 20.00 | ms/batch 10.00 | loss  6.83 | "
                "ppl  1000.00"
            ),
            "-----",
            "| end of epoch   1 | time: 50.00s | valid loss  5.50 | valid ppl   250.00",
            (
                "| epoch   2 |   200/ 2983 batches | lr 20.00 | ms/batch 10.00 | loss  5.63 | "
                "ppl  2000.00"
            ),
        ],
        loss=[(200, 7.63), (400, 6.83), (3183, 5.63)],
        val_loss=[(400, 5.5)],
    ),
    Trainer(
        "fairseq",
        [
            (
                "2026-11-28 08:00:00 | INFO | train_inner | epoch 001:    100 / 1000 loss=10.5, "
                "ppl=1448.15, wps=0, num_updates=100, lr=1e-05"
            ),
            (
                "2026-11-28 08:00:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss "
                "9.1 | ppl 500 | num_updates 1000"
            ),
            (
                "2026-11-28 08:00:00 | INFO | train_inner | epoch 002:    100 / 1000 loss=8.5, "
                "ppl=1448.15, num_updates=1100, lr=1e-05"
            ),
        ],
        loss=[(100, 10.5), (1100, 8.5)],
    ),
    Trainer(
        "OpenNMT-py",
        [
            (
                "[2026-11-28 08:00:00,000 INFO] Step 50/100000; acc: 5.1; ppl: 8000.0; xent: "
                "9.0; lr: 0.0001;"
            ),
        ],
    ),
    Trainer(
        "DeepSpeed",
        [
            (
                "[2026-11-28 08:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, "
                "skipped=0, lr=[1e-05], mom=[[0.9, 0.95]]"
            ),
            "steps: 10 loss: 2.5000 iter time (s): 0.5 samples/sec: 3.2",
        ],
        loss=[(10, 2.5)],
    ),
    Trainer(
        "Megatron-LM, its validation",
        [
            (
                " iteration       10/     100 | consumed samples:   80 | lm loss: 6.910000E+00 | "
                "grad norm: 1.2 |"
            ),
            (
                " validation loss at iteration 10 | lm loss value: 6.800000E+00 | lm loss PPL: "
                "9.0E+02 |"
            ),
        ],
        loss=[(10, 6.91)],
    ),
    Trainer(
        "OpenRLHF",
        [
            (
                "Train epoch [1/2]:  10%|##########| 10/100 [00:01<00:02, 1.2it/s, gpt_loss=1.2, "
                "loss_mean=1.3, lr=1e-5]"
            ),
            (
                "Train epoch [2/2]:  10%|##########| 10/100 [00:01<00:02, 1.2it/s, gpt_loss=1.1, "
                "loss_mean=1.3, lr=1e-5]"
            ),
        ],
        loss=[(10, 1.2), (110, 1.1)],
    ),
    Trainer(
        "verl",
        [
            (
                "step:10 - global_seqlen/min:100 - actor/entropy:0.5 - actor/kl_loss:0.01 - "
                "actor/pg_loss:0.02 - critic/vf_loss:3.1 - perf/time_per_step:9"
            ),
        ],
        loss=[(10, 0.02)],
    ),
    Trainer(
        "stable-baselines3",
        [
            "| time/                   |             |",
            "|    iterations           | 10          |",
            "| train/                  |             |",
            "|    loss                 | 0.0312      |",
        ],
    ),
    Trainer(
        "RSL-RL",
        [
            "                       Learning iteration 10/1500                       ",
            "                       Value function loss: 0.0123",
            "                            Surrogate loss: -0.0100",
        ],
        loss=[(10, -0.01)],
    ),
    Trainer(
        "YOLOv5",
        [
            "      Epoch    GPU_mem   box_loss   obj_loss   cls_loss  Instances       Size",
            (
                "      0/299      1.2G    0.05      0.03      0.02         16        640:  "
                "45%|##########| 10/22 [00:01<00:02, 1.2it/s]"
            ),
        ],
    ),
    Trainer(
        "YOLOX",
        [
            (
                "2026-11-28 08:00:00 | INFO     | yolox.core.trainer:260 - epoch: 1/300, iter: "
                "10/1000, mem: 100Mb, iter_time: 0.5s, data_time: 0.0s, total_loss: 12.5, "
                "iou_loss: 3.1, lr: 1.0e-03"
            ),
        ],
        loss=[(10, 12.5)],
    ),
    Trainer(
        "mmcv",
        [
            (
                "2026-11-28 08:00:00,000 - mmdet - INFO - Epoch [1][50/7330]\tlr: 2.0e-02, eta: "
                "1:00, loss_cls: 1.1, loss: 2.3000"
            ),
            "2026-11-28 08:00:00,000 - mmdet - INFO - Epoch(val) [1][10]\tloss: 0.5",
        ],
        loss=[(50, 2.3)],
    ),
    Trainer(
        "Swin",
        [
            (
                "[2026-11-28 08:00:00 swin] (main.py 228): INFO Train: [0/300][10/1251]\teta "
                "1:00 lr 0.000010\t wd 0.05\ttime 0.5\tloss 6.9000 (6.9500)\tgrad_norm 1.2"
            ),
            (
                "[2026-11-28 08:00:00 swin] (main.py 270): INFO Test: [0/98]\tTime 0.9\tLoss "
                "2.1000 (2.1)"
            ),
        ],
        loss=[(10, 6.9)],
    ),
    Trainer(
        "MAE",
        [
            (
                "Epoch: [0]  [  20/1251]  eta: 0:10:00  lr: 0.000010  loss: 0.9000 (0.9500)  "
                "time: 0.5"
            ),
            (
                "Epoch: [1]  [  20/1251]  eta: 0:10:00  lr: 0.000010  loss: 0.8000 (0.9500)  "
                "time: 0.5"
            ),
        ],
        loss=[(20, 0.9), (1271, 0.8)],
    ),
    Trainer(
        "DINO",
        [
            "Epoch: [0/100]  [  20/1251]  eta: 0:10:00  loss: 10.9000 (10.9500)  lr: 0.000010",
            "Epoch: [1/100]  [  20/1251]  eta: 0:10:00  loss: 9.9000 (10.9500)  lr: 0.000010",
        ],
        loss=[(20, 10.9), (1271, 9.9)],
    ),
    Trainer(
        "open_clip",
        [
            (
                "2026-11-28,08:00:00 | INFO | Train Epoch: 0 [  1024/12800 (8%)] Data (t): 0.1 "
                "Batch (t): 0.5, 10/s LR: 0.000010 Logit Scale: 14.2 Contrastive_loss: 4.8000 "
                "(4.9) Loss: 4.8000 (4.9)"
            ),
            "2026-11-28,08:00:00 | INFO | Eval Epoch: 1 [256 / 1024]\tClip Loss: 4.5000\t",
        ],
        loss=[(1024, 4.8)],
    ),
    Trainer(
        "run_clm_no_trainer.py",
        [
            "  5%|##########| 10/200 [00:01<00:02, 1.2it/s]",
            "epoch 0: perplexity: 12.3 eval_loss: 2.5",
            "epoch 1: perplexity: 11.3 eval_loss: 2.4",
        ],
        val_loss=[(0, 2.5), (1, 2.4)],
    ),
    Trainer(
        "AllenNLP",
        [
            "accuracy: 0.5, loss: 0.6900 ||:  10%|##########| 10/100 [00:01<00:02, 1.2it/s]",
            "accuracy: 0.6, loss: 0.5900 ||:  20%|##########| 20/100 [00:01<00:02, 1.2it/s]",
        ],
        loss=[(10, 0.69), (20, 0.59)],
    ),
    Trainer(
        "flair",
        [
            "2026-11-28 08:00:00,000 epoch 1 - iter 10/100 - loss 2.50 - time (sec): 1.20",
            "2026-11-28 08:00:00,000 epoch 1 - iter 100/100 - loss 2.40 - time (sec): 1.20",
            "2026-11-28 08:00:00,000 EPOCH 1 done: loss 2.1000 - lr: 0.100000",
            "2026-11-28 08:00:00,000 DEV : loss 1.5 - f1-score (micro avg)  0.5",
            "2026-11-28 08:00:00,000 epoch 2 - iter 10/100 - loss 2.00 - time (sec): 1.20",
        ],
        loss=[(10, 2.5), (100, 2.4), (110, 2.0)],
    ),
    Trainer(
        "llm.c",
        [
            (
                "step   10/19560 | loss 10.9500 (+nanz)| norm 15.3 (+nanz)| lr 2.1e-06 | 250 ms "
                "| 50% bf16 MFU | 2000 tok/s"
            ),
            "val loss 10.9000",
        ],
        loss=[(10, 10.95)],
        val_loss=[(10, 10.9)],
    ),
    Trainer(
        "modded-nanogpt",
        [
            "step:10/1750 train_time:1000ms step_avg:100.00ms",
            "step:125/1750 val_loss:4.5000 train_time:12500ms step_avg:100ms",
        ],
        val_loss=[(125, 4.5)],
    ),
    Trainer(
        "nanochat",
        [
            (
                "step 00010/21400 (0.05%) | loss: 9.500000 | lrm: 1.00 | dt: 500.00ms | tok/sec: "
                "1000 | mfu: 10.00 | total time: 0.1m"
            ),
            "Step 00250 | Validation bpb: 1.2000",
        ],
        loss=[(10, 9.5)],
    ),
    Trainer(
        "lingua",
        [
            (
                "0: INFO 26-11-28 08:00:00 - step: 10  acc: 0  loss:  9.5000  grad: 1.20e+00  "
                "flops: 1e+14  wps: 1.00e+04"
            ),
        ],
        loss=[(10, 9.5)],
    ),
    Trainer(
        "skorch",
        [
            "  epoch    train_loss    valid_acc    valid_loss     dur",
            "      1        0.6905       0.5000        0.6900  0.0100",
        ],
    ),
    Trainer(
        "catalyst",
        [
            "train (1/10) | loss: 0.5000 | lr: 0.0100",
            "valid (1/10) | loss: 0.4000",
            "* Epoch (1/10)",
        ],
    ),
    Trainer(
        "FSDP T5 tutorial",
        [
            "Train Epoch: \t1, Loss: \t2.5000",
            "Validation Loss: 2.2000",
            "Train Epoch: \t2, Loss: \t2.1000",
        ],
        loss=[(1, 2.5), (2, 2.1)],
        val_loss=[(1, 2.2)],
    ),
    Trainer(
        "NVIDIA BERT",
        [
            (
                "DLL 2026-11-28 08:00:00.000000 - Training Epoch: 0 Training Iteration: 10  "
                "step_loss : 11.2 learning_rate : 1e-4"
            ),
        ],
        loss=[(10, 11.2)],
    ),
    Trainer(
        "NVIDIA ConvNets",
        [
            (
                "DLL 2026-11-28 08:00:00.000000 - Epoch: 0 Iteration: 10  train.loss : 6.9 "
                "train.compute_ips : 100"
            ),
            (
                "DLL 2026-11-28 08:00:00.000000 - Epoch: 0 Iteration: 20  train.loss : 6.8 "
                "train.compute_ips : 100"
            ),
            "DLL 2026-11-28 08:00:00.000000 - Epoch: 0 Iteration: 5  val.loss : 6.5",
            "DLL 2026-11-28 08:00:00.000000 - Epoch: 1 Iteration: 10  train.loss : 6.7",
        ],
        loss=[(10, 6.9), (20, 6.8), (30, 6.7)],
        val_loss=[(20, 6.5)],
    ),
    Trainer(
        "Colossal-AI",
        [
            "Epoch [0/2]:  10%|##########| 10/100 [00:01<00:02, 1.2it/s, loss=2.5]",
            "Epoch [1/2]:  10%|##########| 10/100 [00:01<00:02, 1.2it/s, loss=2.4]",
        ],
        loss=[(10, 2.5), (110, 2.4)],
    ),
    Trainer(
        "gaussian-splatting",
        [
            (
                "Training progress:   1%|##########| 300/30000 [00:01<00:02, 1.2it/s, "
                "Loss=0.1234567]"
            ),
            (
                "Training progress:   1%|##########| 310/30000 [00:01<00:02, 1.2it/s, "
                "Loss=0.1234000]"
            ),
        ],
        loss=[(300, 0.1234567), (310, 0.1234)],
    ),
    Trainer(
        "latent-diffusion",
        [
            (
                "Epoch 0:   1%|##########| 10/1000 [00:01<00:02, 1.2it/s, loss=0.5, v_num=0, "
                "train/loss_simple_step=0.4, train/loss_vlb_step=0.01, train/loss_step=0.55, "
                "global_step=9.0]"
            ),
        ],
        loss=[(10, 0.5)],
    ),
    Trainer(
        "DGL gcn",
        [
            "Epoch 00000 | Loss 1.9451 | Accuracy 0.1500 |",
            "Epoch 00001 | Loss 1.9351 | Accuracy 0.2500 |",
        ],
        loss=[(0, 1.9451), (1, 1.9351)],
    ),
    Trainer(
        "DGL GraphSAGE",
        [
            "Epoch 00000 | Step 00000 | Loss 2.5 | Train Acc 0.1 | Speed (samples/sec) 100",
            "Epoch 00000 | Step 00020 | Loss 2.4 | Train Acc 0.1",
            "Epoch 00001 | Step 00000 | Loss 2.3 | Train Acc 0.1",
        ],
        loss=[(0, 2.5), (20, 2.4), (40, 2.3)],
    ),
    Trainer(
        "Pyro",
        [
            "[iteration 0001] loss: 1.5000",
            "[iteration 0101] loss: 1.4000",
        ],
        loss=[(1, 1.5), (101, 1.4)],
    ),
    Trainer(
        "GPyTorch",
        [
            "Iter 1/50 - Loss: 1.063   lengthscale: 0.693   noise: 0.693",
        ],
        loss=[(1, 1.063)],
    ),
    Trainer(
        "torchdiffeq",
        [
            "Iter 0020 | Total Loss 0.500000",
        ],
        loss=[(20, 0.5)],
    ),
    Trainer(
        "PEFT",
        [
            (
                "epoch=0: train_ppl=tensor(3.3, device='cuda:0') train_epoch_loss=tensor(1.2, "
                "device='cuda:0') eval_ppl=tensor(2.2, device='cuda:0') "
                "eval_epoch_loss=tensor(0.8, device='cuda:0')"
            ),
        ],
        loss=[(0, 1.2)],
        val_loss=[(0, 0.8)],
    ),
    Trainer(
        "DeepSpeed-Chat",
        [
            "Beginning of Epoch 1/16, Total Micro Batches 100",
            "Epoch: 0, Step: 10, Rank: 0, loss = 2.5",
            "ppl: 5.1, loss: 1.6",
        ],
        loss=[(10, 2.5)],
    ),
    Trainer(
        "minGPT",
        [
            "iter_dt 10.00ms; iter 100: train loss 3.10000",
            "iter_dt 10.00ms; iter 200: train loss 3.00000",
        ],
        loss=[(100, 3.1), (200, 3.0)],
    ),
    Trainer(
        "makemore",
        [
            "step 10 | loss 2.5000 | step time 12.00ms",
            "step 500 train loss: 2.1 test loss: 2.2",
        ],
        loss=[(10, 2.5), (500, 2.1)],
        val_loss=[(500, 2.2)],
    ),
    Trainer(
        "a download and a preprocessing above epochs",
        [
            "100%|##########| 9912422/9912422 [00:01<00:02, 1.2MB/s]",
            "100%|##########| 2708/2708 [00:01<00:02, 1.2it/s]",
            "Epoch: 001, Loss: 1.2",
            "Epoch: 002, Loss: 1.1",
        ],
        loss=[(1, 1.2), (2, 1.1)],
    ),
    Trainer(
        "folds",
        [
            "Fold 1",
            "step 1 loss 2.0",
            "step 2 loss 1.5",
            "Fold 2",
            "step 1 loss 2.1",
            "step 2 loss 1.6",
        ],
        loss=[(1, 2.0), (2, 1.5), (3, 2.1), (4, 1.6)],
    ),
    Trainer(
        "an evaluation that looks like the training",
        [
            "step 1 loss 2.0",
            "step 2 loss 1.5",
            "Evaluating ...",
            "step 1 loss 1.8",
            "step 2 loss 1.9",
        ],
        loss=[(1, 2.0), (2, 1.5)],
    ),
    Trainer(
        "once an epoch at one count",
        [
            "Epoch 1 step 100 loss 2.0",
            "Epoch 2 step 100 loss 1.5",
        ],
        loss=[(100, 2.0), (200, 1.5)],
    ),
    Trainer(
        "values of an evaluation behind",
        [
            "Epoch 1 | Train Loss: 0.5 | Val Loss: 0.4 | Val Acc: 0.9",
            "Epoch 2 | Train Loss: 0.3 | Val Loss: 0.35 | Val Acc: 0.9",
        ],
        loss=[(1, 0.5), (2, 0.3)],
        val_loss=[(1, 0.4), (2, 0.35)],
    ),
]
