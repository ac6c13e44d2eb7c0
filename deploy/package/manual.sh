#!/usr/bin/env bash
# manual.sh KVKEEPD KVKEEPCTL FOLDER: write the pages of the manual from what the programs say of
# themselves, so that they cannot drift apart.
set -euo pipefail
kvkeepd=$1
kvkeepctl=$2
folder=$3
version=$("$kvkeepd" --version | sed -E 's/^kvkeepd //')
mkdir -p "$folder"

# Text as it is, for roff.
verbatim() {
    echo .nf
    sed -e 's/\\/\\e/g' -e "s/^[.']/\\\\\&&/" -e 's/-/\\-/g'
    echo .fi
}

{
    echo ".TH KVKEEPD 8 \"\" \"kvkeep $version\" \"System administration\""
    echo .SH NAME
    echo 'kvkeepd \- keeps the KV cache of language models outside the inference workers'
    echo .SH SYNOPSIS
    echo '.B kvkeepd'
    echo '[\fIOPTION\fR...]'
    echo .SH DESCRIPTION
    "$kvkeepd" --help | sed '1,2d' | verbatim
    echo .SH SEE ALSO
    echo '.BR kvkeepctl (1), kvkeepd.conf (5)'
} >"$folder/kvkeepd.8"

{
    echo ".TH KVKEEPD.CONF 5 \"\" \"kvkeep $version\" \"File formats\""
    echo .SH NAME
    echo 'kvkeepd.conf \- configuration of kvkeepd'
    echo .SH DESCRIPTION
    echo 'The file below says what the defaults say.'
    "$kvkeepd" --print-config | verbatim
    echo .SH SEE ALSO
    echo '.BR kvkeepd (8), kvkeepctl (1)'
} >"$folder/kvkeepd.conf.5"

{
    echo ".TH KVKEEPCTL 1 \"\" \"kvkeep $version\" \"User commands\""
    echo .SH NAME
    echo 'kvkeepctl \- kvkeepd for operators, from a terminal or a script'
    echo .SH SYNOPSIS
    echo '.B kvkeepctl'
    echo '[\fIOPTION\fR...] \fICOMMAND\fR ...'
    echo .SH DESCRIPTION
    "$kvkeepctl" --help | sed '1,2d' | verbatim
    echo .SH COMMANDS
    "$kvkeepctl" --help | sed -nE 's/^  ([a-z-]+) .*/\1/p' | while read -r command; do
        echo ".SS $command"
        "$kvkeepctl" "$command" --help 2>&1 | sed -E "s/^kvkeepctl $command: //" | verbatim
    done
    echo .SH SEE ALSO
    echo '.BR kvkeepd (8)'
} >"$folder/kvkeepctl.1"

gzip -9nf "$folder"/kvkeepd.8 "$folder"/kvkeepd.conf.5 "$folder"/kvkeepctl.1
