# Two commands do everything, set-up included:
#   make loop   train a small model on the built-in stories, export it, verify the export
#   make test   everything CI checks
# tools/make.py holds the steps and prints each command; without make: python tools/make.py loop

# The first Python that is new enough; say PYTHON=… for another
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; exit; fi; done; echo python3)
else
chosen := --chosen
endif

go = @command -v $(PYTHON) >/dev/null 2>&1 || { echo "make: no $(PYTHON) here. Python 3.11 or newer is needed; say which one: make $@ PYTHON=/path/to/python3"; exit 1; }; \
  $(PYTHON) tools/make.py $@ $(chosen)

.PHONY: help loop test gpu lowest docs setup hooks clean
help:  ## List the commands
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/'

loop:  ## Set up, train, export, verify, print the table (FRESH=1: train again)
	$(go) $(if $(FRESH),--fresh)

test:  ## Set up, run every notebook and test, build and check wheel and site (ONLY=fresh,notebooks,pytest)
	$(go) $(if $(ONLY),--only $(ONLY))

gpu:  ## On a machine with an NVIDIA GPU: notebooks with GPU cells, and tests/gpu (WRITE=dir: save the outputs; WHEELS=dir: without a network)
	$(go) $(if $(ONLY),--only $(ONLY)) $(if $(WRITE),--write "$(WRITE)") $(if $(WHEELS),--wheels "$(WHEELS)")

lowest:  ## The loop, and gradients under torch.compile, with the oldest versions that settings.ini allows
	$(go)

docs:  ## Build docs/ and README.md from the notebooks
	$(go)

setup:  ## Make .venv with everything a developer needs
	$(go)

hooks: setup  ## Let git and Jupyter keep notebooks clean (writes .git/config and ~/.jupyter)
	.venv/bin/nbdev_install_hooks

clean:  ## Remove what the commands made: environments, runs, build folders
	rm -rf .venv .venv-lowest runs _proc build dist *.egg-info .pytest_cache
