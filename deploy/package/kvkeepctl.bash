# bash completion for kvkeepctl: asks the program itself, so it knows what this version knows.
_kvkeepctl() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local commands command="" word
    case $previous in
    --ca | --cert | --key | --plot | --config | --trace | --folder | --html | --file | --prompt-file)
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        return
        ;;
    esac
    commands=$(kvkeepctl --help 2>/dev/null | sed -nE 's/^  ([a-z-]+) .*/\1/p')
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        if grep -qxF -- "$word" <<<"$commands"; then
            command=$word
            break
        fi
    done
    if [[ -z $command ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$commands --connect --token --ca --cert --key \
            --server-name --json --help" -- "$current")
    elif [[ $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "--help --json $(kvkeepctl "$command" --help 2>&1 |
            grep -oE -- '--[a-z][a-z0-9-]*' | sort -u)" -- "$current")
    else
        # The first word of what a command takes: create, list and the like.
        mapfile -t COMPREPLY < <(compgen -W "$(kvkeepctl "$command" --help 2>&1 |
            sed -nE "s/^(usage: | +)(kvkeepctl )?$command ([a-z]+).*/\3/p" | sort -u)" \
            -- "$current")
        [[ ${#COMPREPLY[@]} -gt 0 ]] || mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}
complete -F _kvkeepctl kvkeepctl
