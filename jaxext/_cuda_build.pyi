"""The module that CMakeLists.txt writes."""

REASON: str
SOURCES: str
