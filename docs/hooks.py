"""What MkDocs does beside its plugins: the README becomes the first page, and links to files outside docs/ lead to the repository.

If `repo_url` is not set, such links become plain text.
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
ROOT = pathlib.Path(__file__).parent.parent


def on_files(files, config):
    text = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.dirname(page.file.src_uri)
    of_readme = page.file.src_uri == "index.md"

    def outside(match):
        text, target = match.groups()
        path, _, _ = target.partition("#")
        inside = posixpath.normpath(posixpath.join(folder, path))
        if not path or "://" in path or files.get_file_from_path(inside):
            return match[0]
        path = path if of_readme else posixpath.normpath(posixpath.join("docs", inside))
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]  # MkDocs says that it is broken
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    return LINK.sub(outside, markdown)
