"""MkDocs hooks: the README becomes the first page, pages get the sections that they include (`docs/tables.py`), notebooks become pages, and
links to files outside docs/ lead to the repository.

The repository is `Source` among the URLs in pyproject.toml; without one such links become plain text.  MkDocs' `repo_url` stays unset: with
it the pages would ask GitHub for the number of stars.
"""

import pathlib
import posixpath
import tomllib

import notebooks
import tables
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Source")


def on_files(files, config):
    text = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    for path in sorted(notebooks.FOLDER.glob("*.ipynb")):
        text, pictures = notebooks.page(path)
        for name, content in {f"{path.stem}.md": text, **pictures}.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))


def on_page_markdown(markdown, page, config, files):
    folder = "" if page.file.src_uri == "index.md" else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def link(match):
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if path == "README.md":
            return f"[{text}]({posixpath.relpath('docs/index.md', folder)}#{anchor})"
        if path.startswith("docs/notebooks/"):
            return f"[{text}]({target.replace('.ipynb', '.md')})"
        if path.startswith("docs/") or files.get_file_from_path(path) or not (ROOT / path).exists() or target.startswith("#"):
            return match[0]  # a page, or elsewhere; MkDocs says which are broken
        return f"[{text}]({SOURCE}/blob/main/{path})" if SOURCE else text

    return tables.LINK.sub(link, tables.expanded(markdown, posixpath.dirname(page.file.src_uri)))
