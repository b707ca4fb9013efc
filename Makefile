# Everything runs in .venv, which is made on the first call and again when what it depends on changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Two cores are enough for the tests, whose processes take one thread each. Many of them wait for each other, or for
# a timeout: two tests at a time.
# Which vector instructions there are is read from the processor's flags: to try them out takes each process seconds.
# Memory that is freed is kept for what comes next. PyTorch's cache of what ops make of fake tensors pays where a model
# repeats itself; for the tests' small ones it costs a fifth of the time.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 TORCH_FAKE_TENSOR_DISPATCH_CACHE=0 \
	MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_TOP_PAD_=33554432 MALLOC_MMAP_THRESHOLD_=536870912

.PHONY: demo test lint install clean

demo: $(INSTALLED)
	$(BIN)/python examples/train_gla.py --out out/demo

test: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Three folders of the package stand at the root; the type checker sees them where they are installed.
	@rm -rf build/typing && mkdir -p build/typing/zeco_compile
	@ln -s $(CURDIR)/zeco_compile/* $(CURDIR)/passes $(CURDIR)/lowering $(CURDIR)/kernels build/typing/zeco_compile/
	cd build/typing && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p zeco_compile

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
