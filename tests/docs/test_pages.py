"""What the README and the pages show works as shown, and their links lead somewhere."""

import re

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, fences, run_page

pytest.importorskip("torch")

RUN = [
    ROOT / "README.md",
    DOCS / "tutorial.md",
    DOCS / "concepts.md",
    DOCS / "reliability.md",
    DOCS / "errors.md",
    DOCS / "many-ranks.md",
    DOCS / "preemption.md",
    DOCS / "saving.md",
]


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    """A reader's first day: an empty directory, and no settings."""
    monkeypatch.chdir(tmp_path)
    for name in ("CKPTSTORE", "CKPTSTORE_MANIFEST", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("page", RUN[1:], ids=lambda page: page.name)
def test_what_a_page_shows_works(page, tmp_path):
    run_page(page, tmp_path)


def test_the_readme_works_and_its_training_resumes_where_it_stopped(tmp_path):
    printed = run_page(ROOT / "README.md", tmp_path)
    assert printed["python train.py 100"] == "starting after step 0\n"
    assert printed["python train.py 200"] == "starting after step 100\n"
    assert "demo" in printed["ckptstore -s ckpts ls"]
    listed = printed["ckptstore -s ckpts ls demo"]
    assert all(re.search(rf"\b{step}\b", listed) for step in (50, 100, 150, 200)), listed
    assert "200" in printed["ckptstore -s ckpts show demo@latest"]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN], ids=lambda page: page.name)
def test_python_on_the_other_pages_compiles(page):
    for fence in fences(page):
        if fence.language == "python":
            compile("\n" * fence.line + fence.body, str(page), "exec", dont_inherit=True)


def headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(found), f"{page.name} links to {target}"


def nav():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[2]
    return re.findall(r": (\S+\.md)$", text, re.MULTILINE)


def test_the_navigation_has_every_page_once():
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert sorted(nav()) == pages


def test_pages_speak_of_the_project_alone():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for word in ("/work", "DESIGN.md", "issue #", "TODO", "the lead"):
            assert word not in text, f"{page.name}: {word}"


def test_design_notes_are_short_and_of_one_form():
    for page in sorted((DOCS / "design").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert re.match(r"# \d{3}: ", text), page.name
        for part in ("## Problem", "## Decision", "## Rejected", "## Tested"):
            assert part in text, f"{page.name} has no {part!r}"
        assert len(text.split()) <= 600, f"{page.name} is longer than a page"
