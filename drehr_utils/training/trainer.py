"""One trainer over a fixed schedule of batches, and DR.EHR's contrastive training with it (§3.3, §4.2)."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from drehr_utils import artifacts, files
from drehr_utils.config import StageConfig
from drehr_utils.errors import DataError
from drehr_utils.training import losses
from drehr_utils.training.encoders import RECOMPUTED_TOKENS, Rounded, embed_buckets, encode, has_fast_bf16, skip_padding
from drehr_utils.training.sampling import Collator, PositivePairs, TrainingSet, batch_schedule, deal

# A training that draws fewer of the texts that `keep` holds than this share encodes those alone: seconds for minutes.
FEW_DRAWS = 0.25


def contrastive_loss(
    S: Tensor, columns: Tensor, known: Tensor, config: StageConfig, left_out: Tensor | None = None
) -> Tensor:
    """A batch's loss from S [chunks, unique entities], the drawn `columns` [chunks, n] and `known` [chunks, entities]:
    the authors' code's, or with `per_anchor` the equations'.

    Chunks are anchors over all drawn entities of the batch, repeats included, as the paper has it: a chunk's own draws
    are its positives, the others' its negatives (in-batch negatives, §3.3). `mask_false_negatives` leaves out the
    others' draws that are known positives of the chunk. Pairs of `left_out` [chunks, entities] are no negatives either.
    `both_ways` adds the same loss with each entity as anchor over the batch's chunks; one logarithm a batch is divided
    by the number of chunks in both directions."""
    multi_similarity = losses.multi_similarity_loss if config.per_anchor else losses.batch_multi_similarity_loss
    hyper = losses.PAPER._replace(beta=config.beta)
    left_out = torch.zeros_like(known) if left_out is None else left_out
    (n_chunks, n_drawn), flat = columns.shape, columns.reshape(-1)
    own = torch.eye(n_chunks, dtype=torch.bool, device=S.device).repeat_interleave(n_drawn, dim=1)
    spared = left_out | known if config.mask_false_negatives else left_out
    loss = multi_similarity(S[:, flat], own, ~own & ~spared[:, flat], hyper)
    if config.both_ways:
        positives = known if config.mask_false_negatives else torch.zeros_like(known).scatter_(1, columns, True)
        back = multi_similarity(S.T, positives.T, (~positives & ~left_out).T, hyper)
        loss = (loss + (back if config.per_anchor else back * S.shape[1] / n_chunks)) / 2
    return loss


def ranks() -> tuple[int, int]:
    """This process's number among those that `torchrun` started to train one model, and how many they are."""
    state = PartialState(cpu=not torch.cuda.is_available())
    return state.process_index, state.num_processes


def wait_for_all() -> None:
    """Returns when each of torchrun's processes has come here."""
    PartialState(cpu=not torch.cuda.is_available()).wait_for_everyone()


def gathered(own: Tensor, total: int) -> Tensor:
    """The `total` embeddings [total, dim] of a joint batch, in order, of which `own` are this process's (Collator.own).

    Every process makes the same loss of them, and has the gradient for its own rows alone. Data parallelism takes the
    mean of the processes' gradients where this needs their sum, hence the factor."""
    rank, world = ranks()
    if world == 1:
        return own
    padded = torch.nn.functional.pad(own, (0, 0, 0, -(-total // world) - len(own)))
    padded.register_hook(lambda gradient: world * gradient)
    parts = [torch.empty_like(padded) for _ in range(world)]
    torch.distributed.all_gather(parts, padded.detach())
    parts[rank] = padded
    return torch.stack(parts, dim=1).flatten(0, 1)[:total]


class StepBar(ProgressCallback):
    """One progress bar with the loss, instead of a line (or table row, in a notebook) a step."""

    def on_log(self, args, state, control, logs=None, **_):
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)


MEASURED = "measured.csv"  # in a training's output folder


class Curve(TrainerCallback):
    """Measures the model every so many steps and after the last, into the table MEASURED; a resumed run adds to it."""

    def __init__(self, every: int, measure: Callable[[torch.nn.Module], dict[str, float]]):
        self.every, self.measure = every, measure

    def on_step_end(self, args, state, control, model=None, **_):
        due = state.global_step % self.every == 0 or state.global_step == state.max_steps
        if due and state.is_world_process_zero:
            path = Path(args.output_dir, MEASURED)
            rows = pd.read_csv(path).to_dict("records") if path.exists() else []
            rows = [row for row in rows if row["step"] < state.global_step]  # a killed run made some of them twice
            table = pd.DataFrame([*rows, {"step": state.global_step} | self.measure(model)])
            files.write_atomically(path, table.to_csv(index=False).encode())


class OnTheWay(TrainerCallback):
    """Calls `measure(model, step)` before the first step, at so many `points` of a training and after the last."""

    def __init__(self, measure: Callable[[torch.nn.Module, int], None], points: int = 9):
        self.measure, self.points = measure, points

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % -(-state.max_steps // self.points) == 0 or state.global_step == state.max_steps:
            self.measure(model, state.global_step)

    on_train_begin = on_step_end


class ScheduledTrainer(Trainer):
    """transformers' Trainer over a fixed schedule of batches, its `train_dataset`; `loss` is a scalar of the model and
    a collated batch."""

    def __init__(self, *args, loss: Callable[[torch.nn.Module, dict], Tensor], **kwargs):
        super().__init__(*args, **kwargs)
        self.loss = loss

    def get_train_dataloader(self) -> DataLoader:
        # batch_size=None would do without the list of one, but a training that goes on skips by a batch sampler
        own = {"num_workers": self.args.dataloader_num_workers, "collate_fn": lambda one: self.data_collator(*one)}
        return DataLoader(self.train_dataset, batch_size=1, **own)

    def _rounds(self, model: torch.nn.Module) -> bool:
        """On a CPU with bf16; but layers that compute anew in the backward pass would find the float32 weights."""
        encoder = isinstance(self.accelerator.unwrap_model(model), SentenceTransformer)
        return encoder and self.args.bf16 and self.args.use_cpu and not self.args.activation_checkpointing

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        loss = self.loss(Rounded(model) if self._rounds(model) else model, inputs)
        return (loss, {}) if return_outputs else loss


def prepare_for_training(model: torch.nn.Module, config: Any) -> None:
    """Sets the dropout, that of adapters aside, and on a CPU plain attention: its fused kernel is slower backwards."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and config.dropout is not None and "lora_dropout" not in name:
            module.p = config.dropout
        elif isinstance(module, SentenceTransformer) and module.device.type == "cpu":
            module[0].auto_model.set_attn_implementation("eager")
            module[0].unpad_inputs = None  # after skip_padding: plain attention would join texts that are end to end


def training_arguments(output: Path, config: Any, steps: int, save_steps: int = 0, **settings) -> TrainingArguments:
    """AdamW, warm-up and linear decay (§4.2) over `steps` batches.

    `config` has batch_size, learning_rate, seed, and warmup_ratio unless `settings`, TrainingArguments' fields that
    differ from these, have warmup_steps. `save_steps` 0: no checkpoints."""
    if "warmup_steps" not in settings:
        settings["warmup_steps"] = round(config.warmup_ratio * steps)
    fixed = dict(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        optim="adamw_torch_fused",
        bf16=has_fast_bf16(),
        use_cpu=not torch.cuda.is_available(),
        seed=config.seed,
        data_seed=config.seed,
        logging_steps=1,
        save_steps=save_steps or steps,
        save_total_limit=1,  # the one before goes when the next is whole
        save_strategy="steps" if save_steps else "no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_broadcast_buffers=False,  # an encoder's are constants
    )
    arguments = TrainingArguments(**(fixed | settings))
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several in one process would cut each tensor: torchrun uses them all
    return arguments


def is_whole(checkpoint: Path) -> bool:
    """Whether nothing of a checkpoint is missing or cut off; a run that was killed leaves one half written."""
    try:
        TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))  # the Trainer writes it last
        with safe_open(checkpoint / "model.safetensors", framework="pt"):
            pass
    except (OSError, ValueError, TypeError, SafetensorError):
        return False
    world = ranks()[1]
    states = ["rng_state.pth"] if world == 1 else [f"rng_state_{rank}.pth" for rank in range(world)]
    parts = sorted(checkpoint.glob("global_step*/*.pt"))  # DeepSpeed's: the model, and the optimizer by process
    optimizer = parts if len(parts) > world else [checkpoint / "optimizer.pt"]
    return all(map(zipfile.is_zipfile, [*optimizer, *(checkpoint / name for name in ("scheduler.pt", *states))]))


def newest_checkpoint(output: Path) -> Path | None:
    """The newest whole checkpoint in `output`. The others that aren't whole are removed: the Trainer, which keeps the
    newest by time or number, whole or not, might keep one of them in a good one's place."""
    newest = None
    for checkpoint in sorted(output.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1])):
        if is_whole(checkpoint):
            newest = checkpoint
        elif ranks()[0] == 0:
            artifacts.remove(checkpoint)
    return newest


def fit(trainer: Trainer, progress: bool = True) -> pd.DataFrame:
    """Trains the trainer's model in place, from its output folder's newest whole checkpoint if there is one; returns
    the loss curve: step, loss, learning_rate."""
    trainer.remove_callback(PrinterCallback)
    if progress:
        trainer.add_callback(StepBar)
    trainer.train(resume_from_checkpoint=newest_checkpoint(Path(trainer.args.output_dir)))
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)  # or it would go on computing in bf16
    log = pd.DataFrame([row for row in trainer.state.log_history if "loss" in row])
    return log[["step", "loss", "learning_rate"]].reset_index(drop=True)


def train(
    model: torch.nn.Module,
    schedule: Sequence[list],
    collator: Callable[[list], dict],
    loss: Callable[[torch.nn.Module, dict], Tensor],
    config: Any,
    output: Path,
    *,
    save_steps: int = 0,
    joint: bool = False,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    **settings,
) -> pd.DataFrame:
    """Trains `model` in place on the schedule's batches, each a list that `collator` makes a model's input of; returns
    the loss curve, with what a Curve among the `callbacks` measured in the columns beside it.

    Of processes that torchrun started, each takes its share of the batches (sampling.deal, `joint`), so that a schedule
    has fewer steps; the loss that is returned is their mean.

    `loss` of the model and a collated batch is what a step minimises. `config` and `settings`: training_arguments'.
    `output` holds checkpoints, one every `save_steps` (0: none), from which a run that was cut off goes on when called
    again with the same arguments."""
    prepare_for_training(model, config)
    schedule = deal(schedule, *ranks(), joint)
    arguments = training_arguments(output, config, len(schedule), save_steps, **settings)
    own = {"train_dataset": schedule, "data_collator": collator, "callbacks": list(callbacks), "loss": loss}
    trainer = ScheduledTrainer(model=model, args=arguments, **own)
    curve, measured = fit(trainer, progress), Path(output, MEASURED)
    return curve.merge(pd.read_csv(measured), on="step", how="left") if measured.exists() else curve


def similarities(chunks: Tensor, entities: Tensor, windows: Tensor, of_chunk: Tensor, share: float) -> Tensor:
    """S [chunks, entities] as search has it (search.windows.blended): a chunk's own cosine similarity and, by its
    share, that of the best of its `windows` [windows, dim], of which `of_chunk` [windows] says whose each is."""
    of_windows, whole = windows @ entities.T, chunks @ entities.T
    rows = of_chunk[:, None].expand_as(of_windows)
    best = torch.full_like(whole, -1.0).scatter_reduce(0, rows, of_windows, "amax")
    return (1 - share) * whole + share * best


def batch_loss(model: torch.nn.Module, inputs: dict, config: StageConfig) -> Tensor:
    """`contrastive_loss` of a batch that sampling.Collator made; with other texts in it, `config.keep` times how far
    they are from where they were `before` is added."""
    chunks, entities = (embed_buckets(model, inputs[name], config.recompute) for name in ("chunks", "entities"))
    if config.gather_negatives:
        chunks, entities = (gathered(own, n) for own, n in zip((chunks, entities), inputs["known"].shape, strict=True))
    if "windows" in inputs:
        windows = embed_buckets(model, inputs["windows"], config.recompute)
        S = similarities(chunks, entities, windows, inputs["of_chunk"], config.windows)
    else:
        S = chunks @ entities.T
    loss = contrastive_loss(S, inputs["columns"], inputs["known"], config, inputs["left_out"])
    if "others" in inputs:
        loss = loss + config.keep * losses.embedding_drift(embed_buckets(model, inputs["others"]), inputs["before"])
    return loss


def train_stage(
    encoder: SentenceTransformer,
    data: TrainingSet,
    config: StageConfig,
    output: Path,
    *,
    reference: SentenceTransformer | None = None,
    **options,
) -> pd.DataFrame:
    """`train` with the loss of §3.3 on chunks and their positive entities; `options`: train's.

    `reference`: the encoder whose embeddings of the data's other texts `config.keep` holds on to."""
    if config.keep and reference is None:
        raise ValueError("StageConfig.keep: give train_stage the reference encoder whose embeddings are kept")
    if config.windows and config.gather_negatives:
        raise DataError("StageConfig.windows: with gather_negatives each process would lack the others' windows")
    schedule = batch_schedule(data.note_ids, config)
    skip_padding(encoder)
    share, most = ranks() if config.gather_negatives else (0, 1), RECOMPUTED_TOKENS if config.recompute else None
    own = {"most": most, "windows": config.windows > 0, "share": share}
    pairs = PositivePairs(data, config)
    if config.keep:  # what never changes is computed once for the whole training
        kept = data.other_texts
        if len(schedule) * config.batch_size * config.kept_per_chunk < FEW_DRAWS * len(kept):
            kept = list(dict.fromkeys(text for batch in schedule for key in batch for text in pairs[key].others))
        own["before"] = dict(zip(kept, encode(reference, kept, bf16=True), strict=True))
    collator = Collator(encoder, data.graph.concepts_of, **own)

    def collate(keys: list[tuple[int, int]]) -> dict:
        return collator([pairs[key] for key in keys])

    loss, joint = partial(batch_loss, config=config), config.gather_negatives
    return train(encoder, schedule, collate, loss, config, output, joint=joint, **options)
