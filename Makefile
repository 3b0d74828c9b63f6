# `make demo` and `make test` do all their set-up on a fresh machine: a virtual environment in the tree, an install, a run.
PYTHON ?= python3
VENV := .venv
JOBS ?= 2
INSTALLED := $(VENV)/.installed

.PHONY: demo test clean

demo: $(INSTALLED)
	$(VENV)/bin/python examples/generate.py --model examples/checkpoints/kjv --temperature 0.8 \
		--prompt "And it came to pass" --prompt "Blessed is the man that"

# Triton compiles nothing in a process that interprets its kernels, so those tests run in one of their own.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n $(JOBS)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -q -n $(JOBS)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q setuptools torch -c constraints.txt
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e '.[transformers,dev]' -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV)
