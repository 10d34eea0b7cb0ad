#!/usr/bin/env bash
# Make a virtual environment with speculators 0.9.0 and dflash 0.1.0 on a CPU: environment.sh DIRECTORY
# The former asks for torchvision and torchaudio, which bring CUDA and are needed for nothing here;
# so their own requirements are left out and listed below.
set -euo pipefail
python3 -m venv "$1"
"$1/bin/pip" install -q torch==2.13.0
"$1/bin/pip" install -q 'transformers>=5,<=5.19' 'datasets>=4,<=5.1' 'loguru>=0.7.2,<=0.7.3' \
  'tqdm<=4.70.1' 'openai>=2' 'numpy>=2,<=2.5.4' 'pydantic>=2' aiohttp click httpx huggingface-hub \
  protobuf psutil pydantic-settings rich safetensors typer
"$1/bin/pip" install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0 dflash==0.1.0
"$1/bin/python" -c 'import dflash.model, speculators'
