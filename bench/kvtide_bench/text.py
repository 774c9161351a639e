"""The text that the demo's conversation is about; it ships with the package."""

from importlib.resources import files


def text() -> str:
    """About 24,000 characters of English prose, written for this project."""
    return files("kvtide_bench").joinpath("data/harbour.txt").read_text(encoding="utf-8")


def parts(whole: str, count: int) -> list[str]:
    """``count`` runs of paragraphs of about equal length. Raises ValueError when the text has too few."""
    paragraphs = whole.strip().split("\n\n")
    total, seen = sum(map(len, paragraphs)), 0
    runs: list[list[str]] = [[] for _ in range(count)]
    for paragraph in paragraphs:
        runs[int((seen + len(paragraph) / 2) * count / total)].append(paragraph)
        seen += len(paragraph)
    if not all(runs):
        raise ValueError(f"the text has {len(paragraphs)} paragraphs, too few for {count} turns")
    return ["\n\n".join(run) for run in runs]
