#!/bin/sh
# Checks the CUDA backend on a machine with a GPU, in at most five minutes.
#
#   tools/gpu_check.sh [REPORT.json]
#
# Makes a virtual environment, installs lazykv with the CuPy that fits the driver, and runs
# tools/gpu_check.py, whose exit code it returns: 0 passed, 1 something failed, 3 no GPU or nothing
# to use it with, 4 something was not finished in time. The report says more.
#
#   GPU_CHECK_PYTHON  an interpreter with CuPy, pytest and what lazykv needs: nothing is installed,
#                     and lazykv is this folder's
#   GPU_CHECK_WHEELS  a folder of wheels to install from, without a network
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
report=${1:-gpu_check.json}

if ! { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; } && [ ! -e /dev/nvidia0 ]
then
    echo "gpu_check: got no GPU (nvidia-smi lists none), need one with its driver" >&2
    exit 3
fi

if [ -n "${GPU_CHECK_PYTHON:-}" ]; then
    export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
    exec "$GPU_CHECK_PYTHON" "$here/tools/gpu_check.py" --report "$report"
fi

# CuPy is built for one major version of CUDA; "CUDA Version: 13.0" is the newest the driver runs.
cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p' | head -n 1)
if [ "${cuda:-12}" -ge 13 ]; then major=13; else major=12; fi
extra=cuda$major

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
start=$(date +%s)
python3 -m venv "$folder/venv"
set -- --quiet --disable-pip-version-check
if [ -n "${GPU_CHECK_WHEELS:-}" ]; then set -- "$@" --no-index --find-links "$GPU_CHECK_WHEELS"; fi
code=0
timeout 180 "$folder/venv/bin/pip" install "$@" "$here[$extra,conformance]" || code=$?
if [ "$code" -eq 124 ]; then
    echo "gpu_check: got no environment from pip in 180 s, need one; GPU_CHECK_WHEELS is faster" >&2
    exit 4
elif [ "$code" -ne 0 ]; then
    echo "gpu_check: got no environment from pip, need lazykv[$extra,conformance]" >&2
    exit 1
fi
echo "installed lazykv[$extra] in $(($(date +%s) - start)) s"
left=$((288 - ($(date +%s) - start)))
if [ "$left" -lt 60 ]; then left=60; fi

cd "$folder" # so that the installed package is checked, not the folder's
case $report in /*) ;; *) report=$OLDPWD/$report ;; esac
"$folder/venv/bin/python" "$here/tools/gpu_check.py" --report "$report" \
    --minutes "$(echo "$left" | awk '{print $1 / 60}')" || code=$?
exit "$code"
