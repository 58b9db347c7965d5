"""Downloads from a real local HTTP server, with miniature archives of the sources' formats."""

import csv
import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest

from drehr_utils.data import public_data
from drehr_utils.data.public_conversions import convert_ncbi
from drehr_utils.data.public_data import SOURCES, RemoteFile, Source, download, fetch, main, verify
from drehr_utils.errors import DataError
from drehr_utils.evaluation.medquad import load_medquad
from drehr_utils.papers.radiology.reports import read_iu_xray


class Server:
    """Serves `files`; `cut[name]` sends that many bytes once, then hangs up. `asked` records the names."""

    def __init__(self):
        self.files, self.cut, self.asked = {}, {}, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.strip("/")
                outer.asked.append(name)
                if name not in outer.files:
                    return self.send_error(404)
                self.send_response(200)
                self.send_header("Content-Length", str(len(outer.files[name])))
                self.end_headers()
                self.wfile.write(outer.files[name][: outer.cut.pop(name, None)])

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.server.shutdown()
    server.server.server_close()


def zipped(members: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def remote(server: Server, name: str, content: bytes, known: bool = True) -> RemoteFile:
    server.files[name] = content
    return RemoteFile(name, f"{server.url}/{name}", hashlib.sha256(content).hexdigest() if known else None)


def test_download_is_whole_checked_and_made_once(server, tmp_path):
    file = remote(server, "a.zip", b"x" * 300_000)
    path = download(file, tmp_path, progress=False)
    assert path.read_bytes() == server.files["a.zip"] and list(tmp_path.iterdir()) == [path]
    download(file, tmp_path, progress=False)
    assert server.asked == ["a.zip"]


@pytest.mark.parametrize("known", [True, False])
def test_interrupted_download_leaves_nothing_and_is_made_anew(server, tmp_path, known):
    content = bytes(range(256)) * 2000
    file = remote(server, "a.zip", content, known)
    server.cut["a.zip"] = 200_000
    with pytest.raises(DataError, match=r"a.zip: cannot be fetched .*run this again"):
        download(file, tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
    assert download(file, tmp_path, progress=False).read_bytes() == content


def test_wrong_sum_is_refused_and_deleted(server, tmp_path):
    file = remote(server, "a.zip", b"good")
    server.files["a.zip"] = b"evil"
    with pytest.raises(DataError, match="a.zip: SHA256 hash .* does not match.*compare it by hand"):
        download(file, tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_unreachable_and_missing_say_what_to_do(server, tmp_path):
    url = server.url
    with pytest.raises(DataError, match=r"404.*DREHR_PUBLIC_DATA"):
        download(RemoteFile("no.zip", f"{url}/no.zip"), tmp_path, progress=False)
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(DataError, match=r"cannot be fetched .*copy its folder here and set DREHR_PUBLIC_DATA"):
        download(RemoteFile("no.zip", f"{url}/no.zip"), tmp_path, progress=False)


def medquad_files(server: Server) -> None:
    xml = """<?xml version="1.0" encoding="UTF-8"?><Document id="0000001" source="GHR"><Focus>gout</Focus><QAPairs>
    <QAPair pid="1"><Question qid="0000001-1" qtype="information">What is gout ?</Question><Answer>
      Gout is a disease &amp; it hurts.</Answer></QAPair>
    <QAPair pid="2"><Question qid="0000001-2" qtype="treatment">How?</Question><Answer></Answer></QAPair>
    </QAPairs></Document>"""
    server.files["MedQuAD.zip"] = zipped({"MedQuAD-x/3_GHR_QA/0000001.xml": xml, "MedQuAD-x/readme.txt": ""})
    entity = {"entity": "gout", "entityId": "Q1"}
    cdv = {
        "documents": [
            {"id": "GHR_0000001", "title": "gout", "annotations": [
                {"id": "GHR_0000001-1", "aspect": "information", **entity}, {"id": "GHR_0000001-2", **entity}]}
        ],
        "queries": [
            {"text": "What is gout ?", "results": [{"id": "GHR_0000001-1"}],
             "annotations": [{"aspect": "information", "aspectHeading": "information", **entity}]}
        ],
    }  # fmt: skip
    server.files["MedQuAD_test_annotations.json"] = json.dumps(cdv).encode()


def iu_archive(reports: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in reports.items():
            info = tarfile.TarInfo(f"ecgen-radiology/{name}.xml")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def iu_report(number: int) -> str:
    return f"""<?xml version="1.0" encoding="utf-8"?><eCitation><uId id="CXR{number}"/><MedlineCitation><Article>
    <Abstract>
    <AbstractText Label="COMPARISON">None.</AbstractText><AbstractText Label="INDICATION">Cough</AbstractText>
    <AbstractText Label="FINDINGS">Small effusion,
      no edema.</AbstractText><AbstractText Label="IMPRESSION"/></Abstract></Article></MedlineCitation>
    <MeSH><major>Pleural Effusion/left/small</major><major>Cardiomegaly</major><automatic>edema</automatic></MeSH>
    <parentImage id="a"><caption>PA view</caption></parentImage></eCitation>"""


def test_medquad_becomes_what_its_reader_reads(server, tmp_path):
    medquad_files(server)
    states = fetch(SOURCES["medquad"], tmp_path, server.url, progress=False)
    assert set(states.values()) == {"differs"}  # a miniature is not the real thing, and that is said
    data = load_medquad(tmp_path)
    assert data.passages == {"GHR_0000001-1": "Gout is a disease & it hurts."}
    assert data.queries == {"mq0": "gout information"} and data.qrels == {"mq0": {"GHR_0000001-1": 1}}
    asked = len(server.asked)
    fetch(SOURCES["medquad"], tmp_path, server.url, progress=False)
    assert len(server.asked) == asked


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("queries", '{"id": "q", "entity": "gout", "aspect": "x", "relevant": "p"}', "row 2, field relevant: no list"),
        ("queries", '{"id": "q0", "entity": "gout", "aspect": "x", "relevant": ["p"]}', "row 2, field id: there twice"),
        ("passages", '{"id": "p", "text": "b"}', "row 2, field id: there twice"),
    ],
)
def test_malformed_medquad(tmp_path, name, line, said):
    first = {
        "queries": '{"id": "q0", "entity": "gout", "aspect": "x", "relevant": ["p"]}',
        "passages": '{"id": "p", "text": "a"}',
    }
    (tmp_path / "medquad").mkdir()
    for file, row in first.items():
        with gzip.open(tmp_path / f"medquad/{file}.jsonl.gz", "wt") as out:
            out.write(row + "\n" + (line + "\n" if file == name else ""))
    with pytest.raises(DataError, match=f"{name}.jsonl.gz, {said}"):
        load_medquad(tmp_path)


def test_iu_xray_becomes_what_its_reader_reads(server, tmp_path):
    server.files["NLMCXR_reports.tgz"] = iu_archive({"b": iu_report(10), "a": iu_report(2)})
    fetch(SOURCES["iu_xray"], tmp_path, server.url, progress=False)
    with gzip.open(tmp_path / "iu_xray/indiana_reports.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["uid"] for row in rows] == ["2", "10"]
    assert rows[0]["MeSH"] == "Pleural Effusion/left/small;Cardiomegaly" and rows[0]["image"] == "PA view"
    report = read_iu_xray(tmp_path)[0]
    assert report.findings == "Small effusion, no edema." and report.impression == ""
    assert report.problems == ("Pleural Effusion", "Cardiomegaly")


def test_ncbi_refuses_an_archive_without_its_published_sum(server, tmp_path):
    for part in ("train", "develop", "test"):
        server.files[f"NCBI{part}set_corpus.zip"] = zipped({f"NCBI{part}set_corpus.txt": "1|t|A\n"})
    with pytest.raises(DataError, match="NCBItrainset_corpus.zip: SHA256"):
        fetch(SOURCES["ncbi_disease"], tmp_path, server.url, progress=False)
    unchecked = tuple(RemoteFile(f.name, f.url) for f in SOURCES["ncbi_disease"].files)
    source = Source("", "", "", unchecked, SOURCES["ncbi_disease"].outputs, convert_ncbi)
    fetch(source, tmp_path, server.url, progress=False)
    assert gzip.decompress((tmp_path / "ncbi_disease/NCBItestset_corpus.txt.gz").read_bytes()) == b"1|t|A\n"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("NLMCXR_reports.tgz", b"not an archive", "NLMCXR_reports.tgz: not an archive"),
        ("NLMCXR_reports.tgz", iu_archive({"a": "<broken"}), "a.xml, row 1: not XML"),
        ("NLMCXR_reports.tgz", iu_archive({"x": "<eCitation/>"}), "x.xml, field uId: 'x' has no number"),
        ("MedQuAD_test_annotations.json", b'{"documents": []}', "not CDV's annotations"),
    ],
)
def test_bad_archives_name_the_file(server, tmp_path, name, content, message):
    medquad_files(server)
    server.files[name] = content
    with pytest.raises(DataError, match=message):
        fetch(SOURCES["iu_xray" if name.endswith("tgz") else "medquad"], tmp_path, server.url, progress=False)
    assert not list(tmp_path.rglob("*.gz"))


@pytest.mark.parametrize(
    ("name", "files"),
    [("aci_bench", ["train", "valid", "test1", "test2", "test3"]),
     ("mts_dialog", ["train", "validation", "test1", "test2"])],
)  # fmt: skip
def test_real_notes_become_the_content_that_the_project_was_developed_with(server, tmp_path, name, files):
    """The hosts' files put together again from ours, with their other columns and Windows line ends."""
    source = SOURCES[name]
    (output,) = source.outputs
    at = Path(os.environ.get(public_data.DATA_VARIABLE, public_data.FOLDER)) / output
    if not at.exists():
        pytest.skip(f"{output} isn't at hand (DREHR_PUBLIC_DATA)")
    ours = pd.read_csv(at, dtype=str, keep_default_na=False)
    remotes = []
    for remote_file, split in zip(source.files, files, strict=True):
        if name == "aci_bench":
            part = ours[ours["split"] == split].assign(dataset="virtassist", dialogue="[doctor] hi , how are you ?")
            part = part[["dataset", "encounter_id", "dialogue", "note"]]
        else:
            part = ours[ours["id"].str.startswith(f"{split}-")]
            part = part.assign(ID=part["id"].str.partition("-")[2], dialogue="Doctor: hi")
            part = part[["ID", "section_header", "section_text", "dialogue"]]
        content = part.to_csv(index=False, lineterminator="\n").replace("\n", "\r\n").encode()
        remotes.append(remote(server, remote_file.name, content))
    states = fetch(replace(source, files=tuple(remotes)), tmp_path, progress=False)
    assert states == {output: "ok"}


def test_states_and_command_line(server, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("DREHR_PUBLIC_DATA", raising=False)
    content = {"a.gz": hashlib.sha256(b"text").hexdigest()}
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "b.gz").write_bytes(b"\x1f\x8bno")
    assert verify(tmp_path, content | {"b.gz": "", "c.gz": ""}) == {
        "a.gz": "ok",
        "b.gz": "unreadable",
        "c.gz": "missing",
    }
    assert main(["--check", "--folder", str(tmp_path / "none"), "iu_xray"]) == 1
    assert "missing" in capsys.readouterr().out
    server.files["NLMCXR_reports.tgz"] = iu_archive({"a": iu_report(1)})
    assert main(["--folder", str(tmp_path), "--mirror", server.url, "iu_xray"]) == 0
    printed = capsys.readouterr().out
    assert "Demner-Fushman et al., 2016" in printed and "licence" in printed and "not the content" in printed
    assert f"export DREHR_PUBLIC_DATA={tmp_path}" in printed
    assert main(["--folder", str(tmp_path / "n"), "--mirror", server.url, "ncbi_disease"]) == 1
    assert "404" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["nothing"])
