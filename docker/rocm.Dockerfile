# zaya_hf on AMD GPUs. How to build and run it, and what is not tested: docs/rocm.md.
#
#   docker build -f docker/rocm.Dockerfile -t zaya_hf:rocm .

# AMD's image gives the operating system, compilers and tools such as rocminfo. Its torch is older than zaya_hf asks for,
# so the environment below gets PyTorch's own wheel, which brings the ROCm libraries that it was built with.
ARG BASE_IMAGE=rocm/pytorch
ARG BASE_TAG=rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.10.0
FROM ${BASE_IMAGE}:${BASE_TAG}

# After FROM: an argument from before it is not known here.
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/rocm7.2"
ARG EXTRAS=dev,train,eval

# make, and what `python3 -m venv` needs on Ubuntu.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
# Before the rest: a change of the tests or of the documentation then installs nothing anew.
COPY Makefile pyproject.toml README.md LICENSE ./
COPY src src
COPY eval eval
COPY train train
COPY model_cards model_cards
# The system's Python: in AMD's image, `python3` on the path is another environment with another torch.
RUN make install PYTHON=/usr/bin/python3 TORCH="${TORCH}" EXTRAS="${EXTRAS}"
COPY benchmarks benchmarks
COPY docs docs
COPY docker docker
COPY tests tests
COPY .gitignore ./

ENV PATH=/workspace/.venv/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/tmp/triton

CMD ["zaya", "doctor"]
