# For the scripts that try a connector in its real engine, sourced in the project's top folder with
# $venv set: a virtual environment, what is installed in it, and the daemon.
if [[ ! -x "$venv/bin/python" ]]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet uv
fi

install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }

# Is PyPI's package $1 there in the version $2?
has() {
    [[ $("$venv/bin/uv" pip list --python "$venv/bin/python" 2>/dev/null |
        sed -n "s/^$1  *//p" | tr -d ' ') == "$2" ]]
}

# The client as it is here, the daemon that KVKEEPD names or that was built, and $python.
client_install() {
    install --reinstall-package kvkeep ./client/python
    if [[ -z "${KVKEEPD:-}" ]]; then
        for build in release dev; do
            if [[ -x "build/$build/bin/kvkeepd" ]]; then
                KVKEEPD=$PWD/build/$build/bin/kvkeepd
                break
            fi
        done
    fi
    export KVKEEPD=${KVKEEPD:?no kvkeepd: build it, or name it}
    python=$(realpath -s "$venv/bin/python")
}
