"""Contrastive training of an encoder on chunks and their positive entities (DR.EHR §3.3, §4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from drehr_utils.config import StageConfig
from drehr_utils.training import losses
from drehr_utils.training.encoders import embed_buckets, has_fast_bf16
from drehr_utils.training.sampling import Collator, PositivePairs, TrainingSet, batch_schedule


def contrastive_loss(
    S: Tensor,
    columns: Tensor,
    known: Tensor,
    config: StageConfig,
    left_out: Tensor | None = None,
    hard: Tensor | None = None,
) -> Tensor:
    """A batch's loss from S [chunks, unique entities], the drawn `columns` [chunks, n] and `known` [chunks, entities].

    Chunks are anchors over all drawn entities of the batch, repeats included, as the paper has it: a chunk's own draws
    are its positives, the others' its negatives (in-batch negatives, §3.3). `mask_false_negatives` leaves out the
    others' draws that are known positives of the chunk. Pairs of `left_out` [chunks, entities] are no negatives either.
    Pairs of `hard` [chunks, entities] are, drawn or not. `both_ways` adds the same loss with each entity as anchor
    over the batch's chunks."""
    hyper = dict(alpha=config.alpha, beta=config.beta, lam=config.lam, epsilon=config.epsilon)
    n_chunks, n_drawn = columns.shape
    flat = columns.reshape(-1)
    own = torch.eye(n_chunks, dtype=torch.bool, device=S.device).repeat_interleave(n_drawn, dim=1)
    negatives = ~own
    if config.mask_false_negatives:
        negatives = negatives & ~known[:, flat]
    if left_out is not None:
        negatives = negatives & ~left_out[:, flat]
    sampled = S[:, flat]
    if hard is not None and hard.any():
        beside = hard.any(dim=0)
        sampled = torch.cat([sampled, S[:, beside]], dim=1)
        own = torch.cat([own, torch.zeros_like(hard[:, beside])], dim=1)
        negatives = torch.cat([negatives, hard[:, beside]], dim=1)
    loss = losses.multi_similarity_loss(sampled, own, negatives, **hyper)
    if config.both_ways:
        drawn = torch.zeros_like(known).scatter_(1, columns, True)
        positives = known if config.mask_false_negatives else drawn
        negatives = ~positives if left_out is None else ~positives & ~left_out
        anchors = drawn.any(dim=0)  # a term that is only a hard negative has nothing to find
        terms = (S.T[anchors], positives.T[anchors], negatives.T[anchors])
        loss = (loss + losses.multi_similarity_loss(*terms, **hyper)) / 2
    return loss


class StepBar(TrainerCallback):
    """One progress bar with the loss, instead of the Trainer's line (or table row, in a notebook) a step."""

    def __init__(self, show: bool):
        self.show = show

    def on_train_begin(self, args, state, control, **_):
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=not self.show)

    def on_step_end(self, args, state, control, **_):
        self.bar.update(1)

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)

    def on_train_end(self, args, state, control, **_):
        self.bar.close()


class ContrastiveTrainer(Trainer):
    """transformers' Trainer over a fixed schedule of batches."""

    def __init__(self, *args, config: StageConfig, schedule: list, reference: SentenceTransformer | None, **kwargs):
        super().__init__(*args, **kwargs)
        self.config, self.schedule, self.reference = config, schedule, reference

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_sampler=self.schedule, collate_fn=self.data_collator)

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        chunks = embed_buckets(model, inputs["chunks"], self.config.recompute)
        entities = embed_buckets(model, inputs["entities"], self.config.recompute)
        with torch.autocast(chunks.device.type, enabled=False):  # similarities and the loss in float32
            S = chunks @ entities.T
            masks = inputs["known"], self.config, inputs["left_out"], inputs["hard"]
            loss = contrastive_loss(S, inputs["columns"], *masks)
        if "others" in inputs:
            with torch.no_grad(), self.accelerator.autocast():
                before = embed_buckets(self.reference, inputs["others_before"])
            loss = loss + self.config.keep * losses.embedding_drift(embed_buckets(model, inputs["others"]), before)
        return (loss, {}) if return_outputs else loss


def prepare_for_training(encoder: SentenceTransformer, config: StageConfig) -> None:
    """Sets the dropout, and on a CPU plain attention: its fused kernel's backward pass is slower there."""
    if config.dropout is not None:
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = config.dropout
    if encoder.device.type == "cpu":
        encoder[0].auto_model.set_attn_implementation("eager")


def training_arguments(
    output: Path, config: Any, steps: int, save_steps: int, use_cpu: bool | None = None
) -> TrainingArguments:
    """AdamW, warm-up and linear decay (§4.2) over `steps` batches that the caller's schedule fixes.

    `config` has batch_size, learning_rate, warmup_ratio and seed; `save_steps` 0: no checkpoints."""
    return TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=round(config.warmup_ratio * steps),
        optim="adamw_torch",
        bf16=has_fast_bf16(),
        use_cpu=not torch.cuda.is_available() if use_cpu is None else use_cpu,
        seed=config.seed,
        data_seed=config.seed,
        logging_steps=1,
        save_steps=save_steps or steps,
        save_total_limit=1,
        save_strategy="steps" if save_steps else "no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def fit(trainer: Trainer, model: torch.nn.Module, output: Path) -> pd.DataFrame:
    """Trains `model` in place, from the last checkpoint in `output` if there is one; returns step, loss, lr."""
    trainer.remove_callback(PrinterCallback)
    checkpoints = sorted(Path(output).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # or it would go on computing in bf16
    log = pd.DataFrame([row for row in trainer.state.log_history if "loss" in row])
    return log[["step", "loss", "learning_rate"]].reset_index(drop=True)


def train_stage(
    encoder: SentenceTransformer,
    data: TrainingSet,
    config: StageConfig,
    output: Path,
    *,
    reference: SentenceTransformer | None = None,
    save_steps: int = 50,
    callbacks: Sequence[TrainerCallback] = (),
    progress: bool = True,
    use_cpu: bool | None = None,
) -> pd.DataFrame:
    """Trains `encoder` in place with AdamW, warm-up and linear decay (§4.2); returns the loss curve (step, loss, lr).

    `output` holds checkpoints: a run that was cut off goes on from the last one when called again with the same data
    and configuration. `reference`: the encoder whose embeddings of the data's other texts `config.keep` holds on to."""
    if config.keep and reference is None:
        raise ValueError("StageConfig.keep: give train_stage the reference encoder whose embeddings are kept")
    prepare_for_training(encoder, config)
    note_ids = [chunk_id.rsplit("_", 1)[0] for chunk_id in data.ids]
    schedule = batch_schedule(note_ids, config, len(data.graph.names))
    arguments = training_arguments(output, config, len(schedule), save_steps, use_cpu)
    trainer = ContrastiveTrainer(
        model=encoder,
        args=arguments,
        train_dataset=PositivePairs(data, config),
        data_collator=Collator(encoder, data.graph.concepts_of, reference=reference, templates=config.templates),
        callbacks=[StepBar(progress), *callbacks],
        config=config,
        schedule=schedule,
        reference=reference,
    )
    return fit(trainer, encoder, output)
