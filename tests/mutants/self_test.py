"""The mutation tools on a project of one source: kinds of change compile, seeds repeat, verdicts are told apart."""
import concurrent.futures
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent

SOURCE = """// A message is not to be changed: 1 < 2.
#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

namespace sample {

enum class Way { up, down };
enum Dtype { kFloat, kDouble, kBFloat16 };
struct Range { int begin; int end; };
struct NoGradGuard {
  explicit NoGradGuard(int& depth) : depth(depth) { ++depth; }
  ~NoGradGuard() { --depth; }
  int& depth;
};

int depth = 0;

int guarded() {
  NoGradGuard no_grad(depth);
  return depth;
}

int clamp_sum(const std::vector<int>& values, int limit, bool strict) {
  if (limit < 0 && strict) throw std::invalid_argument("the limit is " + std::to_string(limit - 1));
  int sum = 0;
  for (const int value : values) {
    if (value == 3) continue;
    sum += value;
  }
  for (int i = 0; i < limit; ++i) {
    if (i > 5) break;
    sum = sum - 1;
  }
  return std::min(sum, limit * 2);
}

Range cut(int length, int at) { return {at, length - at}; }
bool upwards(Way way) { return !(way == Way::down); }
Dtype wide() { return kFloat; }
int difference(int a, int b) { return a - b; }
int called(int a, int b) { return difference(a, b); }
void push(std::deque<int>& queue, int value) {
  queue.push_back(value);
  if (queue.size() > 2) queue.pop_front();
}

int nobody_asks(int x) { return x > 4 ? x / 2 : x; }

}  // namespace sample
"""

TEST = """#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <unistd.h>
#include <vector>
namespace sample {
enum class Way { up, down };
enum Dtype { kFloat, kDouble, kBFloat16 };
struct Range { int begin; int end; };
int guarded();
int clamp_sum(const std::vector<int>& values, int limit, bool strict);
Range cut(int length, int at);
bool upwards(Way way);
Dtype wide();
int called(int a, int b);
void push(std::deque<int>& queue, int value);
}
using namespace sample;
int main() {
  // As on a machine that stands still for a while: once, and with a mutant's library.
  const char* once = std::getenv("SAMPLE_STALLS");
  if (once && !std::strstr(std::getenv("LD_LIBRARY_PATH"), "unmutated") && unlink(once) == 0) sleep(600);
  // As GoogleTest prints it.
  std::printf("[ RUN      ] Sample.Adds\\n");
  std::fflush(stdout);
  bool good = guarded() == 1 && clamp_sum({1, 2, 3, 40}, 30, false) == 37 && clamp_sum({1, 3}, 1, true) == 0;
  good = good && clamp_sum({100}, 30, true) == 60 && cut(10, 3).begin == 3 && cut(10, 3).end == 7 && upwards(Way::up);
  good = good && !upwards(Way::down) && wide() == kFloat && called(5, 3) == 2;
  try { clamp_sum({}, -1, true); good = false; } catch (...) {}
  good = good && clamp_sum({}, -1, false) == -2;
  std::deque<int> queue;
  for (int i = 0; i < 4; ++i) push(queue, i);
  good = good && queue.size() == 2 && queue.front() == 2;
  std::printf(good ? "[       OK ] Sample.Adds (0 ms)\\n" : "[  FAILED  ] Sample.Adds (0 ms)\\n");
  return good ? 0 : 1;
}
"""

BUILD = """cmake_minimum_required(VERSION 3.20)
project(sample CXX)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_BUILD_TYPE Release)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(plumb_lib SHARED src/optim/sample.cpp)
add_executable(plumb_optim_tests test.cpp)
target_link_libraries(plumb_optim_tests plumb_lib)
"""

try:
    import clang.cindex  # noqa: F401
except ImportError:
    clang = None


class Mutants(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name).resolve()
        (cls.root / "src/optim").mkdir(parents=True)
        (cls.root / "src/optim/sample.cpp").write_text(SOURCE)
        (cls.root / "test.cpp").write_text(TEST)
        (cls.root / "CMakeLists.txt").write_text(BUILD)
        (cls.root / "nearest.json").write_text('{"nearest": {"optim": ["optim"]}, "left out": {}}')
        cls.build = cls.root / "build"
        for command in (["cmake", "-S", cls.root, "-B", cls.build, "-G", "Ninja"], ["cmake", "--build", cls.build]):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def generate(self, name: str, *options: str) -> dict:
        out = self.root / f"{name}.json"
        subprocess.run([sys.executable, HERE / "generate", "--build", self.build, "--folders", "optim", "--out", out,
                        *options], check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())

    def start(self, mutants: list[dict], *options: str, accepted: list[dict] | None = None) -> subprocess.Popen:
        (self.root / "list.json").write_text(json.dumps({"seed": 1, "mutants": mutants}))
        (self.root / "accepted.json").write_text(json.dumps(accepted or []))
        return subprocess.Popen([sys.executable, HERE / "run-generated", self.root / "list.json", "--build", self.build,
                                 "--nearest", self.root / "nearest.json", "--accepted", self.root / "accepted.json",
                                 "--results", self.root / "results.json", "--grace", "4", *options], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run_list(self, *words, **options) -> tuple[dict, str, int]:
        started = self.start(*words, **options)
        output, _ = started.communicate()
        results = {m["id"]: m["result"] for m in json.loads((self.root / "results.json").read_text())["mutants"]}
        return results, output, started.returncode

    def by_hand(self, name: str, original: str, replacement: str, after: str = "") -> dict:
        """A mutant as `generate` would write it, for machines without libclang."""
        begin = SOURCE.index(original, SOURCE.index(after))
        line = SOURCE[SOURCE.rfind("\n", 0, begin) + 1:SOURCE.index("\n", begin + len(original))]
        return {"id": f"optim-{name}", "file": "src/optim/sample.cpp", "function": "sample::f", "operator": "by hand",
                "text": " ".join(line.split()), "change": f"{original} → {replacement}",
                "line": SOURCE.count("\n", 0, begin) + 1, "begin": begin,
                "end": begin + len(original), "original": original, "replacement": replacement}

    def test_tells_a_kill_a_hang_a_survivor_and_what_does_not_compile_apart(self):
        mutants = [self.by_hand("killed", "a - b", "a + b"), self.by_hand("hangs", "++i", "--i, i = 0"),
                   self.by_hand("survives", "x / 2", "x * 2"), self.by_hand("broken", "length - at", "length at"),
                   self.by_hand("stale", "x > 4", "x < 4") | {"original": "x > 5"}]
        source = (self.root / "src/optim/sample.cpp").read_bytes()
        results, output, code = self.run_list(mutants)
        found = {name.removeprefix("optim-"): result["verdict"] for name, result in results.items()}
        self.assertEqual(found, {"killed": "killed by a test", "hangs": "killed by the time-out",
                                 "survives": "SURVIVED", "broken": "not compiled",
                                 "stale": "not in this source"}, output)
        self.assertIn("optim: killed 2 of 3 (1 by a test, 1 by the time-out; ", output)
        self.assertIn("Sample.Adds", results["optim-killed"]["by"])
        self.assertEqual(code, 1, output)  # two of three are less than the goal
        self.assertEqual((self.root / "src/optim/sample.cpp").read_bytes(), source)

    def test_an_accepted_survivor_counts_neither_way(self):
        mutants = [self.by_hand("killed", "a - b", "a + b"), self.by_hand("survives", "x / 2", "x * 2")]
        reason = {"file": "src/optim/sample.cpp", "text": mutants[1]["text"], "reason": "nobody asks"}
        results, output, code = self.run_list(mutants, accepted=[reason])
        self.assertEqual(results["optim-survives"]["verdict"], "accepted", output)
        self.assertIn("optim: killed 1 of 1", output)
        self.assertEqual(code, 0, output)

    def test_a_start_that_stalls_once_is_no_kill(self):
        stalls = self.root / "stalls"
        stalls.touch()
        with unittest.mock.patch.dict(os.environ, SAMPLE_STALLS=str(stalls)):
            results, output, _ = self.run_list([self.by_hand("survives", "x / 2", "x * 2")])
        self.assertFalse(stalls.exists(), output)
        self.assertEqual(results["optim-survives"]["verdict"], "SURVIVED", output)

    def test_resumes_where_it_stopped(self):
        mutants = [self.by_hand("killed", "a - b", "a + b"), self.by_hand("survives", "x / 2", "x * 2")]
        results, output, _ = self.run_list(mutants, "--seconds", "1e-9")
        self.assertEqual({r["verdict"] for r in results.values()}, {"not run"}, output)
        results, output, _ = self.run_list(mutants, "--resume", "killed")
        results, output, _ = self.run_list(mutants, "--resume")
        self.assertIn("1 mutants to run", output)
        self.assertEqual(results["optim-killed"]["verdict"], "killed by a test", output)
        self.assertEqual(results["optim-survives"]["verdict"], "SURVIVED", output)

    def test_an_interrupted_run_leaves_nobody_behind(self):
        self.check_interrupted(lambda started: started.send_signal(signal.SIGTERM))

    def test_a_signal_that_another_thread_takes_interrupts_as_well(self):
        def tell_a_worker(started: subprocess.Popen):
            worker = max(int(task.name) for task in pathlib.Path(f"/proc/{started.pid}/task").iterdir())
            self.assertNotEqual(worker, started.pid)
            libc = ctypes.CDLL(None, use_errno=True)
            self.assertEqual(libc.tgkill(started.pid, worker, signal.SIGTERM), 0, os.strerror(ctypes.get_errno()))

        self.check_interrupted(tell_a_worker)

    def check_interrupted(self, interrupt):
        started = self.start([self.by_hand("hangs", "++i", "--i, i = 0"), self.by_hand("waits", "a - b", "a + b"),
                              self.by_hand("waits too", "a - b", "b - a")], "--grace", "3000", "--jobs", "1")
        measured = started.stdout.readline() + started.stdout.readline()
        self.assertIn("optim: 1 cases", measured)
        while not self.trials_of(started.pid):
            self.assertIsNone(started.poll())
        interrupt(started)
        try:
            output, _ = started.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            for pid in self.trials_of(started.pid):
                os.kill(pid, signal.SIGKILL)
            started.kill()
            self.fail("it went on: " + started.communicate()[0])
        self.assertEqual(started.returncode, 130, output)
        self.assertIn("3 not run", output)
        self.assertEqual(self.trials_of(started.pid), [])

    @staticmethod
    def trials_of(pid: int) -> list[int]:
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"PLUMB_MUTANT_TRIAL={pid}-".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
        return found

    @unittest.skipIf(clang is None, "libclang is not installed (PyPI: libclang)")
    def test_equal_seeds_give_equal_samples_and_others_others(self):
        one, same, other = (self.generate(f"seed {n}", "--seed", n, "--per-folder", "12") for n in ("5", "5", "6"))
        self.assertEqual(one, same)
        self.assertEqual(len(one["mutants"]), 12)
        self.assertNotEqual([m["id"] for m in one["mutants"]], [m["id"] for m in other["mutants"]])

    @unittest.skipIf(clang is None, "libclang is not installed (PyPI: libclang)")
    def test_every_kind_of_change_makes_another_program_that_compiles(self):
        every = self.generate("all", "--seed", "1", "--per-folder", "0")["mutants"]
        self.assertEqual(len({m["id"] for m in every}), len(every))
        kinds = {m["operator"] for m in every}
        self.assertEqual(kinds, {"arithmetic", "assignment", "comparison", "constant", "dropped assignment",
                                 "dropped branch", "dropped call", "dropped guard", "dropped operand", "dtype",
                                 "early return", "logic", "loop control", "minimum and maximum", "negation",
                                 "off by one", "swapped arguments", "swapped operands"})
        for mutant in every:
            self.assertEqual(SOURCE.encode()[mutant["begin"]:mutant["end"]].decode(), mutant["original"])
            self.assertNotEqual(mutant["original"], mutant["replacement"])
            self.assertFalse(mutant["text"].startswith("//") or "#include" in mutant["text"], mutant)
        self.assertFalse([m for m in every if m["original"] in ("limit - 1", "-") and "throw" in m["text"]],
                         "the text of an error was changed")

        def compiles(mutant: dict) -> bool:
            source = SOURCE.encode()
            changed = source[:mutant["begin"]] + mutant["replacement"].encode() + source[mutant["end"]:]
            return subprocess.run(["c++", "-std=c++20", "-w", "-fsyntax-only", "-x", "c++", "-"], input=changed,
                                  capture_output=True).returncode == 0

        some = {kind: [m for m in every if m["operator"] == kind][:3] for kind in kinds}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for kind, good in zip(some, pool.map(lambda of_kind: [compiles(m) for m in of_kind], some.values())):
                self.assertGreater(2 * sum(good), len(good), f"{kind}: {some[kind]}")

    @unittest.skipUnless(shutil.which("patch"), "needs the program patch")
    def test_every_mutant_made_by_hand_fits_the_present_source(self):
        def fits(path):
            with open(path, "rb") as file:
                return subprocess.run(["patch", "--dry-run", "--silent", "--force", "-p1"], stdin=file, capture_output=True,
                                      cwd=HERE.parents[1]).returncode == 0

        self.assertEqual([path.name for path in sorted(HERE.glob("*.patch")) if not fits(path)], [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
