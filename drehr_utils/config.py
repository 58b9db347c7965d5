"""The plain dataclasses of a run: a stage's and a recipe's hyper-parameters, and the sizes of all five papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

START = "MiniLM (start)"  # the starting encoder's row in every table
MINILM = "minilm"  # the name under which profiles ask for the packaged all-MiniLM-L6-v2
ALPHA, BETA, LAMBDA, EPSILON = 2.0, 50.0, 0.5, 0.1  # of the loss: DR.EHR §3.3, "determined by grid search"
MARGIN = 0.5  # of the triplet loss: epsilon of Radiology §2.3
GRAPH_TERMS = 2  # synonyms, hypernyms and related entities of each positive entity, so many of each: DR.EHR §4.1


@dataclass(frozen=True)
class StageConfig:
    """One stage's hyper-parameters. The defaults are the paper's (§4.2, Table 3, DR.EHR-small, stage II), but for
    dropout."""

    positives_per_chunk: int = 16
    sources: tuple[str, ...] | None = None  # of the positive sets (Table 1's or 2's rows); None: all of them
    batch_size: int = 32
    epochs: float = 1.0
    max_steps: int | None = None  # cuts the epochs short; None: all of them
    learning_rate: float = 1e-4
    warmup_ratio: float = 0.1
    per_anchor: bool = False  # the loss: equations 1-3, a logarithm an anchor; else the authors' code's, one a batch
    mask_false_negatives: bool = False  # a term that is positive for a chunk is never its negative
    both_ways: bool = False  # contrast chunks for an entity as well as entities for a chunk
    substitution: float = 0.0  # probability that a mention in the chunk is replaced by another name of its concept
    complete_labels: bool = False  # a term is also positive for a chunk in which the graph finds the term's concept
    complete_hypernyms: bool = False  # ... or a narrower one (of no effect without complete_labels, as the next)
    leave_out_related: bool = False  # a term related to a concept of the chunk is no negative for it
    windows: float = 0.0  # a chunk's best window's share of its similarity, in training as in search (search.windows)
    keep: float = 0.0  # weight of the pull that holds texts of other kinds where the starting encoder puts them
    kept_per_chunk: int = 1  # how many of them are drawn beside each chunk of a batch
    recompute: bool = False  # encode twice instead of keeping activations: a batch in its largest bucket's memory
    gather_negatives: bool = False  # of several processes, each contrasts with all's terms; else with its own, as §4.2
    chunks_per_note: int = 1  # chunks of one note that share a batch: hard negatives for Single-Patient search
    beta: float = BETA  # of the loss; its alpha, lambda and epsilon are the paper's
    dropout: float | None = 0.0  # None: as the model was trained (0.1 for BERT); on a CPU 0 saves a third of a step
    seed: int = 0

    def steps(self, chunks: int) -> int:
        """How many batches a training on that many chunks is."""
        steps = max(1, round(max(1, chunks // self.batch_size) * self.epochs))
        return min(steps, self.max_steps or steps)

    @property
    def uses_graph(self) -> bool:
        """Whether training itself asks the graph (the positive sets of stage I always hold it)."""
        return any((self.substitution, self.complete_labels, self.keep))


@dataclass(frozen=True)
class Recipe:
    """Two stages in turn; None leaves one out (DR.EHR §3, Table 3)."""

    stage1: StageConfig | None = None
    stage2: StageConfig | None = None
    read_names: bool = False  # the tokenizer reads the graph's opaque names as what they stand for (normalization)

    def each(self, change: Callable[[StageConfig], StageConfig]) -> Recipe:
        """The recipe with each stage that it has changed."""
        return replace(self, stage1=self.stage1 and change(self.stage1), stage2=self.stage2 and change(self.stage2))


@dataclass(frozen=True)
class PairConfig:
    """Hyper-parameters of a training. The defaults are the paper's (§6.1) but for max_steps, scale and dropout."""

    batch_size: int = 128  # of each task, where several are trained together
    epochs: float = 50  # "max epochs" of the first task
    max_steps: int | None = None
    learning_rate: float = 3e-5
    warmup_ratio: float = 0.02
    scale: float = 20.0  # T maps a text to sqrt(scale) times its unit vector, so S is in [-scale, scale]
    mask_false_negatives: bool = False  # concepts of the batch that the mention is known to go with, too
    dropout: float | None = 0.0
    start_share: float = 0.0  # of the starting weights in the saved ones; unlike the paper (Wortsman et al., 2022)
    seed: int = 0


@dataclass(frozen=True)
class TripletConfig:
    """One row of Table 1: RS or HS, NB (mega_batch = batch_size) or MB. Defaults: the paper's best (Appendix A), but
    for dropout."""

    hard: bool = True
    mega_batch: int = 128  # entries among whose sentences the unmatched one is looked for
    batch_size: int = 32
    epochs: int = 10
    max_steps: int | None = None  # cuts the epochs short
    learning_rate: float = 2e-5
    warmup_steps: int = 100  # at most a tenth of the steps
    weight_decay: float = 0.01
    margin: float = MARGIN
    dropout: float | None = 0.0  # None: as the model was trained; see config.StageConfig
    seed: int = 0

    @property
    def label(self) -> str:
        """The paper's name of the row: SBERT/HS/MB(128)."""
        batch = "NB" if self.mega_batch <= self.batch_size else "MB"
        return f"SBERT/{'HS' if self.hard else 'RS'}/{batch}({max(self.mega_batch, self.batch_size)})"


@dataclass(frozen=True)
class Resampling:
    """Of every interval and paired test of a run."""

    samples: int = 1000  # of the bootstrap
    randomizations: int = 10_000  # of the paired test
    seed: int = 0


# --- sizes of a profile's run, paper by paper ------------------------------------------------------------------------


@dataclass(frozen=True)
class CliniqSizes:
    """Of the benchmark's construction and its baselines (notebooks 06, 07)."""

    split: str = "test"  # of the notes
    sample: int | None = None  # so many of them drawn without replacement (CliniQ §3.1: 1,000); None: all
    dev_sample: int = 0  # notes of dev that become a benchmark as well; 0: none, the profile's has one
    recorded: bool = True  # curation and judgments lie beside the profile's benchmark; else a language model makes them
    terms_per_call: int = 25  # of the judging: more cost less, the prompt and the chunk are sent once for all of them
    attempts: int = 3
    answer_tokens_per_term: int = 40  # for the estimate; the limit is three times as much
    retrievers: tuple[str, ...] = ("MiniLM (start)",)  # of search.retrievers; DREHR_RETRIEVERS replaces them


@dataclass(frozen=True)
class KgSizes:
    """Of KG entity retrieval (notebook 12): what the budget allows, and the data that only some users have."""

    training: PairConfig = PairConfig()
    supervised: PairConfig = PairConfig()  # Figure 2's supervised loss
    plain: PairConfig = PairConfig()  # from systems.PLAIN, five times as large as MiniLM
    mended: bool = True  # unlike the paper: systems.training, tasks.cap_spellings
    snomed: Path | None = None  # an RF2 release's folder; None: HPO stands in
    umls: Path | None = None  # a Metathesaurus release's META folder; None: MeSH's diseases stand in
    encoder: str | None = None  # None: the profile's
    pooling: str | None = None
    baselines: tuple[tuple[str, str], ...] = ()  # (row of Table 3, registry name)
    max_pairs: int | None = None  # of a task
    max_mentions: int | None = None
    max_concepts: int | None = None  # of a test set: the gold ones, and others drawn up to this number
    max_codes: int | None = None  # of systems.all_codes, where None is all of ICD-10-CM
    own_mentions: int = 500  # of a task's own dev pairs
    own_concepts: int = 2000
    seen_mentions: int = 300  # of its training pairs: has a system learnt what it was shown?
    seen_concepts: int = 1000
    train_documents: float = 0.6  # of the annotated notes, for the supervised loss of Figure 2


@dataclass(frozen=True)
class CaprSystem:
    """One row of CAPR's Table 3. `config` counts a query-passage pair where DR.EHR has a chunk."""

    name: str
    kind: str  # start, bi, -shared, -dot, poly, -pooled, cross, cdv, -fasttext, -finetune, longformer-bi, -poly
    config: StageConfig | None = None  # None: not trained
    after: str | None = None  # the system whose trained weights it starts from
    encoder: str | None = None  # None: the profile's


@dataclass(frozen=True)
class CaprSizes:
    """Of CAPR (notebook 13). The paper: whole sections, 512 tokens, batches of 32, 50 epochs."""

    systems: tuple[CaprSystem, ...] = ()
    passage_words: int | None = 50  # sections are cut into passages of so many words, or not (None)
    passage_tokens: int = 128
    query_tokens: int = 32
    n_candidates: int = 64
    test_queries: int = 120
    test_passages: int | None = 600  # the candidates' pool, a random sample of the held-out passages (None: all)
    medquad_queries: int = 120  # of MedQuAD's, a random sample that the encoders re-rank
    costly_queries: int = 40  # the part of it for systems that read pairs, or whole documents
    other_names: int = 1000  # queries by another name of the passage's entity
    costly_names: int = 150  # the part of them for the Cross-encoder
    latency_passages: tuple[int, ...] = (16, 64, 256, 1024)
    latency_limit: int = 256  # for the Cross-encoder, which is timed at the fewest passages in any case
    passage_rows: int | None = None  # training passages, the first so many (None: all)
    word_buckets: int = 2_000_000  # of FastText's n-grams, each a vector: 2.4 GB

    def system(self, name: str) -> CaprSystem:
        found = {system.name: system for system in self.systems}
        if name not in found:
            raise ValueError(f"capr.systems: no {name!r}; there are {', '.join(found)}")
        return found[name]


@dataclass(frozen=True)
class RadiologySizes:
    """Of radiology (notebook 14). `best`, the best row of the paper's Table 1, trains the models of Tables 2 to 4."""

    best: TripletConfig = TripletConfig()
    rates: tuple[float, ...] = (2e-5,)  # learning rates tried on dev, collection A's folds; one: as it is
    table1: tuple[TripletConfig, ...] = ()
    mlm: TripletConfig = TripletConfig(learning_rate=5e-5, epochs=5, dropout=None)
    reports: int | None = None  # of each open collection; None: all
    iu_reports: int | None = None  # the first ones
    coded_minimum: int = 10  # reports that carry a coders' heading, for it to be a query
