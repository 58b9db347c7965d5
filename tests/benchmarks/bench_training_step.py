"""A step of training against the plain two-pass step of DR.EHR's public code (§3.3, §4.2): same batches, turn by turn.

    OMP_NUM_THREADS=2 python tests/benchmarks/bench_training_step.py [--batches 6] [--bge-batches 2] [--write]

The batches are stage I's of the open corpus, 32 chunks of 32 entities each: for MiniLM, and for a BERT of bge-base's
shape with random weights. A step is the collator, forward, loss, backward, clipping and AdamW. Ours is
`training.trainer`'s, with bf16 where the machine is fast at it. The plain step does as the authors' code: it encodes
every entity that was drawn, repeats too, pads chunks to the batch's longest and entities likewise (at most 16 tokens),
and has one pass for each, in fp32.

All else that is theirs and leaves the loss as it is, is in the plain step too: transformers' default attention (ours is
the plain one, faster backwards on a CPU), and a copy of the negatives for each chunk's cosines. What would change
the loss or is no training is left out, to its advantage: dropout, metrics of every step; and both read whole chunks,
which theirs cuts at 160 tokens. Each step is a process of its own, and turns alternate, so that other load meets
both; a speed-up is the ratio within one batch. Four batches come first, untimed, until memory has grown to what each
step needs.

The share is of the rate of square bf16 matrix products of the best size, timed before each of our steps. Operations
are those of the encoder's matrix products, forward and backward, padding included, what is computed twice counted once.

Where CUDA is, batches are 32 x 128 and the prefix is train_gpu_; a third step, plain_bf16, is the plain one under bf16
autocast; and DR.EHR-large's, 16 x 32 with adapters on a decoder of Mistral-7B's shape with random weights, comes with
train_gpu_large_: each layer is computed again in the backward pass, and the frozen weights are bf16, but float32 for
the plain step. There collating is left out of all steps' seconds, as a profile's `loaders` do it beside the training,
and stands in its own row.

`--write`: also figures/benchmarks/training_step.json, model by model. Of bge-base's shape the plain step of 32 chunks
takes more memory than a machine of 24 GB has: `--chunks 16`."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from machine import about
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import TrainerCallback

from drehr_utils.config import MINILM, StageConfig
from drehr_utils.training import encoders, losses, sampling, trainer
from drehr_utils.training.sampling import Row

ROOT = Path(__file__).resolve().parents[2]
KINDS, WARM, PRODUCTS = ("ours", "plain"), 4, (1024, 2048, 4096)  # untimed batches; sides of square matrices
HALF, GPU_PRODUCTS = "plain_bf16", (4096, 8192)
BGE = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
LARGE = "large"  # the default MistralConfig is Mistral-7B's; data/profiles/mimic-large.toml has the instruction
INSTRUCTION = "Instruct: Given the medical entity, retrieve relevant paragraphs of patients' medical records\nQuery: "


def plain_collate(rows: Sequence[Row], encoder: SentenceTransformer) -> dict:
    """The chunks, and the entities drawn for all of them, repeats too: two batches, each padded to its longest text."""

    def padded(texts: list[str], limit: int) -> dict[str, Tensor]:
        return dict(encoder.tokenizer(texts, truncation=True, max_length=limit, padding=True, return_tensors="pt"))

    prompt = encoders.query_prompt(encoder)
    before = len(encoder.tokenizer(prompt)["input_ids"]) if prompt else 0
    drawn = [prompt + term for row in rows for term in row.drawn]
    return {
        "chunks": padded([row.text for row in rows], encoders.CHUNK_TOKENS),
        "entities": padded(drawn, before + encoders.ENTITY_TOKENS),
    }


def plain_loss(model: torch.nn.Module, inputs: dict) -> Tensor:
    """The code's loss: a chunk's own entities are its positives, the others' its negatives. Scalar."""
    chunks, entities = (model(dict(inputs[name]))["sentence_embedding"] for name in ("chunks", "entities"))
    each = entities.unflatten(0, (len(chunks), -1))  # [chunks, positives, dim]
    others = torch.stack([torch.cat([each[:i], each[i + 1 :]]).flatten(0, 1) for i in range(len(chunks))])
    parts = [torch.nn.functional.cosine_similarity(chunks[:, None], part, dim=2) for part in (each, others)]
    own = torch.cat([torch.full_like(part, n == 0, dtype=torch.bool) for n, part in enumerate(parts)], dim=1)
    return losses.batch_multi_similarity_loss(torch.cat(parts, dim=1), own, ~own)


def work(inputs: dict, encoder: SentenceTransformer) -> dict[str, float]:
    """Of a collated batch of either step: tokens, those with padding, and the teraflop of a training step's products.

    Forward, a token takes 2 operations for each weight of the layers' linear maps, and a layer of width h takes 4 h for
    each other token that it sees of the padded text, for attention; backward takes both twice more, once more where
    the weights are frozen under adapters, which are left out."""
    size, layers = encoder[0].auto_model.config, encoder[0].auto_model.named_modules()
    linear = sum(
        part.weight.numel()
        for name, part in layers
        if isinstance(part, torch.nn.Linear) and "layer" in name and "lora_" not in name
    )
    h, adapters = size.hidden_size, any("lora_" in name for name, _ in encoder.named_parameters())
    seen = 0.5 if size.model_type == "mistral" else 1.0
    tokens, read = 0, []  # of each text, its tokens with padding
    for batch in (batch for part in ("chunks", "entities") for batch in buckets(inputs[part])):
        if "cu_seq_lens_q" in batch:  # encoders.skip_padding
            own = batch["cu_seq_lens_q"].diff().tolist()
            tokens, read = tokens + sum(own), read + own
        else:
            mask = batch["attention_mask"]
            tokens, read = tokens + int(mask.sum()), read + [mask.shape[1]] * len(mask)
    flop = sum(n * (2 * linear + 4 * h * size.num_hidden_layers * seen * n) for n in read)
    return {"tokens": tokens, "padded": sum(read), "tflop": (2 if adapters else 3) * flop / 1e12}


def buckets(part: dict | list) -> list[dict]:
    return part if isinstance(part, list) else [part]


def product_tflops(device: str, repeats: int = 5) -> float:
    """The rate of square bf16 matrix products, teraflop a second: the median of a few, of the best of the sizes."""
    rates = []
    for size in GPU_PRODUCTS if device == "cuda" else PRODUCTS:
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        a @ b
        seconds = []
        for _ in range(repeats):
            start = now(device)
            a @ b
            seconds.append(now(device) - start)
        rates.append(2 * size**3 / statistics.median(seconds) / 1e12)
    return max(rates)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Turns(TrainerCallback):
    """Waits before each step until it may begin, and tells afterwards what the step took."""

    def __init__(self, kind: str, encoder: SentenceTransformer, wait: Callable[[], object], tell: Callable):
        self.kind, self.encoder, self.wait, self.tell = kind, encoder, wait, tell
        self.device, self.attention = encoder.device.type, encoder[0].auto_model.config._attn_implementation
        self.collating, self.work = 0.0, {}

    def on_train_begin(self, *_, **__):
        if self.kind != "ours":  # prepare_for_training has taken another
            self.encoder[0].auto_model.set_attn_implementation(self.attention)

    def collate(self, rows: list[Row], collator: Callable[[list[Row]], dict]) -> dict:
        start = time.perf_counter()
        inputs = collator(rows)
        self.collating = time.perf_counter() - start  # of one thread, that is processor time as well
        self.work = work(inputs, self.encoder)
        return inputs

    def on_step_begin(self, *_, **__):
        self.wait()
        self.tflops = product_tflops(self.device) if self.kind == "ours" else 0.0
        self.start, self.cpu = now(self.device), time.process_time()

    def on_step_end(self, *_, **__):
        beside = self.device == "cuda"
        seconds = now(self.device) - self.start + (0.0 if beside else self.collating)
        cpu = time.process_time() - self.cpu + self.collating
        step = {"s": seconds, "cpu_s": cpu, "collate_s": self.collating, "bf16_tflops": self.tflops}
        self.tell(step | self.work)


def steps(
    kind: str,
    encoder: SentenceTransformer,
    batches: Sequence[Sequence[Row]],
    wait: Callable[[], object] = lambda: None,
    tell: Callable[[dict], object] = lambda step: None,
) -> list[float]:
    """Trains on the batches in the trainer's loop; returns the losses. `tell` gets each step's seconds and work."""
    config = StageConfig(positives_per_chunk=len(batches[0][0].drawn), batch_size=len(batches[-1]))
    turns = Turns(kind, encoder, wait, tell)
    if kind == "ours":
        encoders.skip_padding(encoder)
        collator, loss, settings = sampling.Collator(encoder), partial(trainer.batch_loss, config=config), {}
    else:
        collator, loss, settings = partial(plain_collate, encoder=encoder), plain_loss, {"bf16": kind == HALF}
    if encoder[0].auto_model.config.model_type == "mistral":
        settings["activation_checkpointing"] = True
    collate = partial(turns.collate, collator=collator)
    with tempfile.TemporaryDirectory() as output:
        curve = trainer.train(
            encoder, batches, collate, loss, config, Path(output), progress=False, callbacks=[turns], **settings
        )
    return curve["loss"].tolist()


def open_batches(number: int, positives: int) -> list[list[Row]]:
    """Stage I's first batches of the open corpus, as its training draws them."""
    from drehr_utils import pipeline
    from drehr_utils.profiles import PROFILES

    profile = PROFILES["open"]
    config = StageConfig(positives_per_chunk=positives)
    data = sampling.TrainingSet.build(pipeline.chunks(profile, stage="stage1"), pipeline.stage1_sets(profile))
    pairs = sampling.PositivePairs(data, config)
    schedule = sampling.batch_schedule(data.note_ids, config)
    return [[pairs[key] for key in batch] for batch in schedule[:number]]


def random_bert(folder: Path, size: dict[str, int]) -> Path:
    """A BERT with random weights and MiniLM's tokenizer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    tokenizer = encoders.load_encoder(MINILM).tokenizer
    BertModel(BertConfig(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_decoder(place: Path, kind: str) -> SentenceTransformer:
    """Mistral-7B's shape with random weights, MiniLM's tokenizer, the last token's state, and adapters. It is made
    where it trains: one of a single layer is what is loaded."""
    from transformers import MistralConfig, MistralModel

    config, folder = MistralConfig(), place / f"{LARGE}-{kind}"
    tokenizer = encoders.load_encoder(MINILM).tokenizer
    MistralModel(MistralConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    encoder = encoders.load_encoder(folder, "lasttoken", instruction=INSTRUCTION)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if kind == "plain" else torch.bfloat16)
    with torch.device(encoder.device):
        encoder[0].model = MistralModel(config)
    torch.set_default_dtype(torch.float32)
    encoders.add_lora(encoder)
    return encoder


def worker(kind: str, model: str, place: Path) -> None:
    """Takes a step at each line that it is sent; its answers go to what was standard output at the start."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the trainer prints
    batches = pickle.loads((place / "batches.pickle").read_bytes())
    if model == LARGE:
        encoder = random_decoder(place, kind)
    else:
        encoder = encoders.load_encoder(model) if model == MINILM else encoders.load_encoder(Path(model), "cls")

    def tell(step: dict) -> None:
        if torch.cuda.is_available():
            memory = torch.cuda.max_memory_allocated() / 1e6
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps(step | {"mb": memory}), file=answers, flush=True)

    def wait() -> None:
        if not sys.stdin.readline():
            sys.exit("no more turns")

    values = steps(kind, encoder, batches, wait, tell)
    print(json.dumps(values), file=answers, flush=True)


def take_turns(
    prefix: str, model: str, batches: Sequence[Sequence[Row]], place: Path, kinds: Sequence[str] = KINDS
) -> tuple[dict[str, list[dict]], dict[str, list[float]]]:
    """Steps of these kinds on each batch in turn: what each of them told of each batch, and its losses."""
    (place / "batches.pickle").write_bytes(pickle.dumps(batches))
    workers, told = {}, {kind: [] for kind in kinds}
    settings = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # batches differ in size
    for kind in kinds:
        command = [sys.executable, __file__, "--worker", kind, "--model", model, "--place", str(place)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        workers[kind] = subprocess.Popen(command, text=True, env=settings, **pipes)
    try:
        for number in range(1 - WARM, len(batches) + 1 - WARM):
            for kind, process in workers.items():
                print("go", file=process.stdin, flush=True)
                line = process.stdout.readline()
                if not line:
                    raise SystemExit(f"{prefix}: the {kind} step ended early, for want of memory perhaps; see above")
                told[kind].append(json.loads(line))
            if number > 0:
                took = {kind: told[kind][-1]["s"] for kind in kinds}
                said = ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in took.items())
                print(f"{prefix} batch {number} of {len(batches) - WARM}: {said}", flush=True)
        return told, {kind: json.loads(process.stdout.readline()) for kind, process in workers.items()}
    finally:
        for process in workers.values():
            process.stdin.close()  # after which one that still waits ends
            process.wait()


def measure(prefix: str, model: str, batches: Sequence[Sequence[Row]], place: Path) -> dict[str, float | int | str]:
    """Both steps' figures, of all batches but the first WARM; on a GPU the plain one under bf16 as well."""
    told, final = take_turns(prefix, model, batches, place)
    ours, plain = told["ours"][WARM:], told["plain"][WARM:]
    ratios = [b["s"] / a["s"] for a, b in zip(ours, plain, strict=True)]

    def median(values) -> float:
        return float(f"{statistics.median(values):.4g}")

    result = {
        "step_s": median(step["s"] for step in ours),
        "plain_step_s": median(step["s"] for step in plain),
        "speedup": median(ratios),
        "speedup_lowest": float(f"{min(ratios):.4g}"),
        "cpu_speedup": median(b["cpu_s"] / a["cpu_s"] for a, b in zip(ours, plain, strict=True)),
        "bf16_tflops": median(step["bf16_tflops"] for step in ours),
        "tflop": median(step["tflop"] for step in ours),
        "plain_tflop": median(step["tflop"] for step in plain),
        "share_of_bf16": median(step["tflop"] / step["s"] / step["bf16_tflops"] for step in ours),
        "tokens": round(median(step["tokens"] for step in ours)),
        "padded_tokens": round(median(step["padded"] for step in ours)),
        "plain_tokens": round(median(step["tokens"] for step in plain)),
        "plain_padded_tokens": round(median(step["padded"] for step in plain)),
        # The same texts learnt from: those of the plain step, repeats counted, so that the two rates compare.
        "tokens_per_s": round(median(b["tokens"] / a["s"] for a, b in zip(ours, plain, strict=True))),
        "plain_tokens_per_s": round(median(step["tokens"] / step["s"] for step in plain)),
        "own_tokens_per_s": round(median(step["tokens"] / step["s"] for step in ours)),  # those that were encoded
        "mb": round(ours[-1]["mb"]),  # the whole process's, at its peak; a GPU's own
        "plain_mb": round(plain[-1]["mb"]),
        "loss": median(final["ours"][WARM:]),
        "plain_loss": median(final["plain"][WARM:]),
        "batches": len(batches) - WARM,
        "chunks": len(batches[0]),
        "positives": len(batches[0][0].drawn),
        "threads": torch.get_num_threads(),
    }
    result |= about()
    if torch.cuda.is_available():
        again, losses_of = take_turns(prefix, model, batches, place, ("ours", HALF))  # three at once need more memory
        beside, half = again["ours"][WARM:], again[HALF][WARM:]
        result |= {
            "collate_s": median(step["collate_s"] for step in ours),
            "plain_collate_s": median(step["collate_s"] for step in plain),
            "plain_bf16_step_s": median(step["s"] for step in half),
            "speedup_on_bf16": median(b["s"] / a["s"] for a, b in zip(beside, half, strict=True)),
            "plain_bf16_share_of_bf16": median(
                b["tflop"] / b["s"] / a["bf16_tflops"] for a, b in zip(beside, half, strict=True)
            ),
            "plain_bf16_mb": round(half[-1]["mb"]),
            "plain_bf16_loss": median(losses_of[HALF][WARM:]),
        }
        result["machine"] = f"{torch.cuda.get_device_name()}; {result['machine']}"
    return {prefix + key: value for key, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6, help="for MiniLM; 0: none")
    parser.add_argument("--bge-batches", type=int, default=2, help="for bge-base's shape; 0: none")
    parser.add_argument("--large-batches", type=int, default=3, help="for DR.EHR-large's, on a GPU; 0: none")
    parser.add_argument("--chunks", type=int, default=32, help="of each batch")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", choices=(*KINDS, HALF), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.model, options.place)
        return

    def measured(part: str, model: str, batches: Sequence[Sequence[Row]]) -> None:
        """Kept at once: the next model may want more memory than there is."""
        result = measure(prefix + part, model, batches, Path(place))
        print(json.dumps(result, indent=1), flush=True)
        if options.write:
            path = ROOT / "figures/benchmarks/training_step.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = json.loads(path.read_text()) if path.exists() else {}  # a GPU's, or the other model's
            path.write_text(json.dumps(kept | result, indent=1) + "\n")

    gpu = torch.cuda.is_available()
    prefix, positives = ("train_gpu_", 128) if gpu else ("train_cpu_", 32)
    batches = open_batches(WARM + max(options.batches, options.bge_batches), positives)
    batches = [batch[: options.chunks] for batch in batches]
    with tempfile.TemporaryDirectory() as place:
        if gpu and options.large_batches:
            measured("large_", LARGE, [batch[:16] for batch in open_batches(WARM + options.large_batches, 32)])
        if options.batches:
            measured("", MINILM, batches[: WARM + options.batches])
        if options.bge_batches:
            model = random_bert(Path(place, "bge"), BGE)
            measured("bge_", str(model), batches[: WARM + options.bge_batches])


if __name__ == "__main__":
    main()
