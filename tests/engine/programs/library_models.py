"""Small models of every shape that transformers has, and how each is trained."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from orchestrator import Trainer, distributed
from orchestrator.engine import export
from tests.engine.programs.basics import message, tell, world

VOCABULARY, CLASSES = 50, 3
ADAPTED = "with an adapter"
WIDTHS = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = {**WIDTHS, "image_size": 32, "patch_size": 16}
VISION = {k: v for k, v in VISION.items() if k not in ("vocab_size", "max_position_embeddings")}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SEQ2SEQ = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
AUDIO = {
    **{k: v for k, v in WIDTHS.items() if k != "max_position_embeddings"},
    "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0,
    "layerdrop": 0.0, "mask_time_prob": 0.0,
}  # fmt: skip
LLAMA = {**WIDTHS, **SPECIAL, "num_key_value_heads": 1}

# Name: (model, config, its keys, what it reads).
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert": ("BertForSequenceClassification", "BertConfig",
             {**WIDTHS, **DRY, "num_labels": CLASSES}, "classes"),
    "bert, masked": ("BertForMaskedLM", "BertConfig", {**WIDTHS, **DRY}, "tokens"),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**WIDTHS, **DRY}, "tokens"),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**WIDTHS, **DRY}, "tokens"),
    "albert": ("AlbertForMaskedLM", "AlbertConfig",
               {**WIDTHS, **DRY, "embedding_size": 16, "classifier_dropout_prob": 0.0}, "tokens"),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig",
                   {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2,
                    "hidden_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}, "tokens"),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config",
                {**WIDTHS, **DRY, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
                "tokens"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {**SPECIAL, "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2,
              "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "tokens"),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, "tokens"),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig",
                    {**LLAMA, "tie_word_embeddings": True}, "tokens"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA, "tokens"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "head_dim": 8}, "tokens"),
    "mamba": ("MambaForCausalLM", "MambaConfig",
              {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2,
               "state_size": 4}, "tokens"),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
            "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}, "tokens"),
    "bart": ("BartForConditionalGeneration", "BartConfig",
             {**SEQ2SEQ, "vocab_size": VOCABULARY, "d_model": 16, "dropout": 0.0}, "tokens"),
    "clip": ("CLIPModel", "CLIPConfig",
             {"text_config": {**WIDTHS, **SPECIAL, "projection_dim": 8},
              "vision_config": VISION, "projection_dim": 8}, "pairs"),
    "vit": ("ViTForImageClassification", "ViTConfig",
            {**VISION, **DRY, "num_labels": CLASSES}, "images"),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
                 {**AUDIO, "num_labels": CLASSES}, "sounds"),
    "resnet": ("ResNetForImageClassification", "ResNetConfig",
               {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2],
                "num_labels": CLASSES, "layer_type": "basic"}, "images"),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 2, 1], "num_labels": CLASSES},
                 "images"),
}  # fmt: skip


def loss(reads: str) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if reads == "tokens":
            return model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
        if reads == "pairs":
            return model(
                input_ids=batch["tokens"], pixel_values=batch["image"], return_loss=True
            ).loss
        if reads == "classes":
            out = model(input_ids=batch["tokens"])
        elif reads == "images":
            out = model(pixel_values=batch["image"])
        else:
            out = model(input_values=batch["sound"])
        return nn.functional.cross_entropy(out.logits[:, :CLASSES], batch["class"])

    return step


def data() -> list[dict[str, Tensor]]:
    own = torch.Generator().manual_seed(0)
    return [
        {
            "tokens": torch.randint(5, VOCABULARY, (8,), generator=own),
            "image": torch.randn(3, 32, 32, generator=own),
            "sound": torch.randn(400, generator=own),
            "class": torch.tensor(index % CLASSES),
        }
        for index in range(8)
    ]


def trained(name: str, directory: Path) -> list[float]:
    """The loss of the second step, the blocks that are gathered one at a time, the loss of an
    evaluation, and the same of the model that from_pretrained makes of an export."""
    import transformers

    model_class, config_class, keys, reads = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**keys)
    model = getattr(transformers, model_class)(config)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    trainer = Trainer(model, optimizer, step=loss(reads), strategy="hybrid_shard")
    fit = DataLoader(data(), 8 // world())
    history = trainer.train(fit, epochs=2, verbose=False)
    blocks = sum(isinstance(module, FSDPModule) for module in model.modules()) - 1
    step = trainer.save_checkpoint(directory / name)
    expected = trainer.evaluate(fit)["loss"]
    if trainer.ranks.rank:
        return []
    out = directory / f"{name} exported"
    export.export(step, out, layout="huggingface")
    again = getattr(transformers, model_class).from_pretrained(out)
    (batch,) = DataLoader(data(), 8)
    with torch.no_grad():
        exported = loss(reads)(again, batch).item()
    return [history[-1]["train_loss"], blocks, expected, exported]


def adapted(directory: Path) -> list[float]:
    """The loss of an evaluation of a model with LoRA that was resumed, the same if it was not, and
    of what peft reads again; the sum of what was trained."""
    import peft
    import transformers

    def base() -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    def trained(epochs: int, **more: Any) -> Trainer:
        config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(base(), config)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
        trainer = Trainer(model, optimizer, step=loss("tokens"), strategy="full_shard")
        trainer.train(fit, epochs=epochs, verbose=False, **more)
        return trainer

    fit = DataLoader(data(), 8 // world())
    at_once = trained(2).evaluate(fit)["loss"]
    trained(1, save_to=directory / "halves")
    trainer = trained(2, save_to=directory / "halves", resume=True)
    step = trainer.save_checkpoint(directory / "adapted")
    expected = trainer.evaluate(fit)["loss"]
    out = directory / "adapter"
    trainer.save(out)
    if trainer.ranks.rank:
        return []
    assert not (out / "config.json").exists() and not (out / "model.safetensors").exists()
    refused = message(lambda: export.export(step, directory / "no", layout="huggingface"))
    assert "its directory is written by peft" in refused, refused
    again = peft.PeftModel.from_pretrained(base(), out)
    (batch,) = DataLoader(data(), 8)
    with torch.no_grad():
        read = loss("tokens")(again, batch).item()
    changed = sum(p.abs().sum().item() for n, p in again.named_parameters() if "lora_B" in n)
    return [expected, at_once, read, changed]


def all_of_them(directory: Path) -> None:
    sys.path.append(os.environ["LIBRARIES"])
    distributed.setup_distributed()
    results: dict[str, Any] = {}
    for name in MODELS:
        kept: list[Any] = []
        raised = message(lambda name=name, kept=kept: kept.append(trained(name, directory)))
        results[name] = kept[0] if kept else raised
    lora: list[Any] = []
    raised = message(lambda: lora.append(adapted(directory)))
    results[ADAPTED] = lora[0] if lora else raised
    tell(directory, results)
