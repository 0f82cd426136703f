"""A finished build as a workshop: makes a library that differs in one source, and touches neither tree nor build."""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

COMPILER = re.compile(r"(^|[/-])(g|c|clang)\+\+[-.\d]*$")


class NotCompiled(Exception):
    pass


class Workshop:
    """Compiles with the build's own commands, without warnings: a mutant may leave a name unused."""

    def __init__(self, build: pathlib.Path, scratch: pathlib.Path, target: str = "plumb_lib"):
        self.build, self.scratch = build, scratch
        scratch.mkdir(parents=True, exist_ok=True)
        self.root = root_of(build)
        self.commands = {}
        for entry in json.loads((build / "compile_commands.json").read_text()):
            words = shlex.split(entry["command"])
            if f"/{target}.dir/" in "/" + words[words.index("-o") + 1]:
                self.commands[str(pathlib.Path(entry["file"]).resolve())] = words
        self.link_words = [self.kept(word) for word in self.find_link(target)]
        self.headers = {}

    def ninja(self, *question: str) -> str:
        asked = ["ninja", "-C", self.build, "-t", *question]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout

    def find_link(self, target: str) -> list[str]:
        listed = self.ninja("commands", target)
        lines = [line for line in listed.splitlines() if " -shared " in line and ".so" in line]
        if not lines:
            raise SystemExit(f"mutants: {self.build} does not say how it links {target}; build it with ninja first")
        command = lines[-1].removeprefix(": && ").removesuffix(" && :")
        return shlex.split(command)

    def kept(self, word: str) -> str:
        """An object file of the build as it is now: a build that goes on meanwhile must not mix with mutants."""
        if not word.endswith(".o") or not (self.build / word).is_file():
            return word
        copy = self.scratch / "objects" / word
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.build / word, copy)
        return str(copy)

    @staticmethod
    def compiling(words: list[str]) -> list[str]:
        """The command without its launcher (a cache would fill up with mutants), and with less optimisation.

        Not with none: the precompiled header was made by an optimising compiler, and serves only such.
        """
        first = next(i for i, word in enumerate(words) if COMPILER.search(word))
        less = {"-O2": "-O1", "-O3": "-O1"}
        return [less.get(word, word) for word in words[first:] if not word.startswith("-Werror")] + ["-w"]

    def dependants(self, header: str) -> list[str]:
        """The sources of the library that a header is compiled into, as ninja knows from the last build."""
        if not self.headers:
            listed = self.ninja("deps")
            by_object = {words[words.index("-o") + 1]: source for source, words in self.commands.items()}
            source = None
            for line in listed.splitlines():
                if line and not line.startswith(" "):
                    source = by_object.get(line.split(": #deps")[0])
                elif source and line.strip():
                    path = os.path.normpath(self.build / line.strip())
                    self.headers.setdefault(path, []).append(source)
        return self.headers.get(header, [])

    def library(self, folder: pathlib.Path, name: str, content: bytes) -> pathlib.Path:
        """The folder that holds the library in which the file `name` (from the root) reads `content`."""
        folder.mkdir(parents=True, exist_ok=True)
        original = str(self.root / name)
        replaced, overlay = {}, []
        if original in self.commands:
            changed = folder / pathlib.Path(name).name
            changed.write_bytes(content)
            replaced[original] = str(changed)
        else:
            changed = folder / "include" / pathlib.Path(name).relative_to("src")
            changed.parent.mkdir(parents=True, exist_ok=True)
            changed.write_bytes(content)
            overlay = ["-iquote", str(folder / "include")]
            replaced = {source: source for source in self.dependants(original)}
            if not replaced:
                raise NotCompiled(f"no source of the library includes {name}")
        link = list(self.link_words)
        for number, (source, actual) in enumerate(replaced.items()):
            words = self.compiling(self.commands[source])
            output = words[words.index("-o") + 1]
            made = str(folder / f"{number}.o")
            words[words.index("-o") + 1] = made
            words[words.index("-c") + 1] = actual
            words[1:1] = overlay
            self.call([*words, "-iquote", str(pathlib.Path(source).parent)])
            link[link.index(str(self.scratch / "objects" / output))] = made
        at = link.index("-o") + 1
        soname = next((w.split("soname,")[1] for w in link if "-soname," in w), pathlib.Path(link[at]).name)
        link[at] = str(folder / soname)
        self.call(link)
        return folder

    def call(self, words: list[str]) -> None:
        done = subprocess.run(words, cwd=self.build, capture_output=True, text=True)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error:" in line), done.stderr[-300:])
            raise NotCompiled(first)


def root_of(build: pathlib.Path) -> pathlib.Path:
    cache = (build / "CMakeCache.txt").read_text()
    return pathlib.Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", cache, re.M)[1]).resolve()
