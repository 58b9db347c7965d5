"""MTEB's own scores of the task against Table 4's and 5's cells, and against ours for an encoder of random vectors."""

import numpy as np
import pandas as pd
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

mteb = pytest.importorskip("mteb", reason="mteb isn't in requirements.lock (270 MB): pip install '.[mteb]'")

from drehr_utils.config import MINILM  # noqa: E402
from drehr_utils.data.benchmark import MATCH_TYPES, load_benchmark  # noqa: E402
from drehr_utils.evaluation.metrics import AVERAGE, means, multi_patient, single_patient  # noqa: E402
from drehr_utils.profiles import ROOT  # noqa: E402
from drehr_utils.search.dense import dense_scores  # noqa: E402
from drehr_utils.training.encoders import load_encoder  # noqa: E402
from drehr_utils.use.mteb_task import MultiPatient, SinglePatient, figures  # noqa: E402

pytestmark = pytest.mark.slow


def evaluated(model, benchmark, split):
    """figures' values by setting, group and metric. MTEB encodes the corpus for each group; here once."""
    encode, kept = model.encode, {}

    def encode_once(inputs, **options):
        new = [text for text in dict.fromkeys(inputs) if text not in kept]
        kept.update(zip(new, encode(new, **options) if new else [], strict=True))
        return np.array([kept[text] for text in inputs])

    model.encode = encode_once
    tasks = [MultiPatient(benchmark, split), SinglePatient(benchmark, split)]
    found = figures(mteb.evaluate(model, tasks, cache=None, show_progress_bar=False))
    return found.set_index(["setting", "group", "metric"])["value"]


def test_minilm_has_table_4s_and_5s_cells():
    found = evaluated(load_encoder(MINILM, device="cpu"), load_benchmark(ROOT / "data/open_cliniq", "test"), "test")
    table_4, table_5 = (
        pd.read_csv(ROOT / f"figures/tables/drehr_table{n}.csv").query("system == 'MiniLM (start)'") for n in (4, 5)
    )
    cells = table_4.set_index(["setting", "group", "metric"])["ours"]
    assert len(cells) == 6 and found[cells.index].to_dict() == pytest.approx(cells.to_dict(), abs=0.1)
    by_type = table_5.query("group in @MATCH_TYPES and metric == @AVERAGE").set_index("group")["ours"]
    averages = found["single"].groupby("group").mean()
    assert set(by_type.index) == set(MATCH_TYPES)
    assert averages[by_type.index].to_dict() == pytest.approx(by_type.to_dict(), abs=0.1)


def test_another_encoder_on_dev_has_our_figures():
    dev = load_benchmark(ROOT / "data/open_cliniq", "dev")
    words = sorted({word for text in [*dev.corpus.values(), *dev.queries.values()] for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    weights = np.random.default_rng(0).normal(size=(len(words), 64)).astype(np.float32)
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")
    scores = dense_scores(*(model.encode(list(part.values())) for part in (dev.queries, dev.corpus)))
    found = evaluated(model, dev, "dev")
    ours = {("multi", "all"): multi_patient(dev, scores), ("single", "all"): single_patient(dev, scores)}
    ours |= {("single", kind): single_patient(dev, scores, kind) for kind in MATCH_TYPES}
    for at, values in ours.items():
        assert found[at].to_dict() == pytest.approx(means(values).drop(AVERAGE).to_dict(), abs=0.1), at


def test_the_revision_is_the_contents_and_data_can_be_unloaded():
    dev, test = (load_benchmark(ROOT / "data/open_cliniq", split) for split in ("dev", "test"))
    first, other = MultiPatient(dev, "dev", "Mine"), MultiPatient(test, "test", "Mine")
    assert first.metadata.name == "MineMultiPatient" and first.metadata.eval_splits == ["dev"]
    assert first.metadata.revision == MultiPatient(dev, "dev").metadata.revision != other.metadata.revision
    first.load_data()
    first.unload_data()
    first.load_data()  # MTEB's cache and a second model ask for it again
    assert len(first.dataset["all"]["dev"]["queries"]) == len(dev.qrels)
