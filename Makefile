# The commands of the project; each does all of its own set-up first. `make help` lists them.
#
#   PYTHON=…       the Python to use: as it is when it has torch 2.11 to 2.13, otherwise as the base of .venv
#   SETUP=no       install nothing, check nothing: everything needed is already there
#   JOBS=…         compile jobs (default: the cores, as far as the memory carries them)
#   CMAKE_ARGS=…   more options for CMake
SHELL := /bin/bash
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 1800
export PYTHON SETUP JOBS CMAKE_ARGS

.PHONY: all setup demo test bench mutants mutants-all asan tsan fuzz soak format lint install wheel test-install compatibility clean distclean help

all:  ## build the program (build/bin/plumb), the library, the tests
	@scripts/build build

setup:  ## system packages and the private virtual environment, nothing else
	@scripts/setup >/dev/null

demo:  ## train a small GPT on 2 ranks on this CPU; leaves a report in runs/
	@scripts/build build plumb
	build/bin/plumb train --ranks 2 --out runs/demo $(ARGS)
	@scripts/promise build/bin/plumb

test:  ## build and run every test
	@scripts/test build

bench:  ## compare with plain steps and with the peers in the same run
	@scripts/bench $(ARGS)

mutants:  ## break each contract, and a sample of single places (SEED=…), and see that a test notices
	@scripts/build build
	@tests/mutants/run $(ARGS)
	$(if $(ARGS),,@tests/mutants/sample-and-run --per-folder 10 --seconds 540 $(if $(SEED),--seed $(SEED)))

mutants-all:  ## the same with every place that can be changed: many hours; goes on where it was interrupted
	@scripts/build build
	@tests/mutants/run
	@tests/mutants/sample-and-run --per-folder 0 --seed 0 --resume

asan:  ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/test build-asan -DPLUMB_SANITIZE=address

tsan:  ## the C++ tests under ThreadSanitizer
	@scripts/test build-tsan -DPLUMB_SANITIZE=thread

fuzz:  ## run the scenario fuzzer for FUZZ_SECONDS (1800), from SEED if given
	@scripts/build build plumb_scenarios_tests
	@scripts/fuzz $(FUZZ_SECONDS) $(SEED)

soak:  ## train for SOAK_SECONDS (1800) while ranks are killed and stopped at random, from SEED if given; after every fault once
	@scripts/build build plumb plumb_cli_tests
	@scripts/faults build $(ARGS)
	@scripts/soak build/bin/plumb $(SEED)

format:  ## lay out all C++ files by .clang-format (CHECK=yes: only look)
	@scripts/format $(if $(CHECK),--check)

lint:  ## clang-tidy over the C++ sources of src/ (ARGS=… names some); the last line counts the findings
	@scripts/build build build.ninja >/dev/null
	@scripts/lint $(ARGS)

install:  ## install the library, the program and the CMake package under PREFIX (/usr/local)
	@scripts/build build
	@cmake --install build --prefix "$(PREFIX)"

wheel:  ## build a wheel of the Python package into dist/, for the torch that is installed
	@python=$$(scripts/setup) && $$python -m pip wheel --no-deps --disable-pip-version-check -w dist .

test-install:  ## pip install . in an empty virtual environment, and its tests there (compiles the library once more)
	@scripts/test-install

compatibility:  ## docs/compatibility.md, from the tables that the tests run through
	@python=$$(scripts/setup) && cd tests/python && PYTHONPATH=../../build/python $$python -m compatibility

clean:  ## remove what was built
	rm -rf build build-asan build-tsan build-mutants

distclean: clean  ## remove the virtual environment too
	rm -rf .venv

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 20
	@echo; sed -n '3,6s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))
