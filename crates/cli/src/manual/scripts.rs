//! The scripts of `vellum completions`: each asks `vellum __complete` what fits.

/// The script for a shell and a program; nothing for a shell that is not known.
pub fn script(shell: &str, program: &str) -> Option<String> {
    let text = match shell {
        "bash" => BASH,
        "zsh" => ZSH,
        "fish" => FISH,
        _ => return None,
    };
    let function = format!("_{}", program.replace('-', "_"));
    // A program by QEMU's name may be QEMU's own: only ours is asked.
    let asked = match (program, shell) {
        ("vellum", "bash") => "\"${COMP_WORDS[0]}\"",
        ("vellum", "zsh") => "\"${(Q)words[1]}\"",
        ("vellum", _) => "$words[1]",
        _ => "vellum",
    };
    Some(
        text.replace("@FUNCTION@", &function)
            .replace("@PROGRAM@", program)
            .replace("@ASKED@", asked),
    )
}

const BASH: &str = r#"# Completions of @PROGRAM@ for bash.
@FUNCTION@() {
    local rest=$COMP_LINE trimmed word at=-1 i line typed kept
    local -a words=() values=()
    # Bash cuts words at '=' and ':'; only white space does so here.
    for ((i = 0; i < ${#COMP_WORDS[@]}; i++)); do
        word=${COMP_WORDS[i]}
        trimmed=${rest#"${rest%%[![:space:]]*}"}
        if ((i == 0)) || [[ $trimmed != "$rest" || -z $rest ]]; then
            words+=("$word")
        else
            words[${#words[@]}-1]+=$word
        fi
        rest=${trimmed#"$word"}
        ((i == COMP_CWORD)) && at=$((${#words[@]} - 1))
    done
    for ((i = 0; i < ${#words[@]}; i++)); do
        words[i]=${words[i]//[\\\"\']/}
    done
    typed=${words[at]}
    # What stands before the last of these stays on the line as it is.
    kept=
    [[ $COMP_WORDBREAKS == *=* && $typed == *=* ]] && kept=${typed%=*}=
    [[ $COMP_WORDBREAKS == *:* && ${typed#"$kept"} == *:* ]] && kept=${typed%:*}:
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
        :files) compopt -o default 2>/dev/null ;;
        :folders) compopt -o dirnames 2>/dev/null ;;
        :*) ;;
        *)
            line=${line%%$'\t'*}
            line=${line#"$kept"}
            [[ $line == *= ]] && compopt -o nospace 2>/dev/null
            # Names of snapshots may hold spaces; keys of options hold nothing to quote.
            [[ $line == *[[:space:]]* ]] && printf -v line '%q' "$line"
            COMPREPLY+=("$line")
            ;;
        esac
    done < <(@ASKED@ __complete @PROGRAM@ "$((at - 1))" "${words[@]:1}" 2>/dev/null)
}
complete -F @FUNCTION@ @PROGRAM@
"#;

const ZSH: &str = r#"#compdef @PROGRAM@
# Completions of @PROGRAM@ for zsh.
@FUNCTION@() {
    local line value about
    local -a lines plain open
    lines=("${(@f)$(@ASKED@ __complete @PROGRAM@ $((CURRENT - 2)) "${(@Q)words[2,-1]}" 2>/dev/null)}")
    for line in "${lines[@]}"; do
        [[ $line == :* ]] && continue
        value=${line%%$'\t'*}
        about=${line#*$'\t'}
        value=${value//:/\\:}
        if [[ $value == *= ]]; then
            open+=("$value${about:+:$about}")
        else
            plain+=("$value${about:+:$about}")
        fi
    done
    (($#plain)) && _describe -t values value plain
    (($#open)) && _describe -t keys key open -S ''
    case ${lines[-1]} in
    :files)
        compset -P '*='
        _files
        ;;
    :folders) _files -/ ;;
    esac
}
if [[ $funcstack[1] == @FUNCTION@ ]]; then
    @FUNCTION@ "$@"
else
    compdef @FUNCTION@ @PROGRAM@
fi
"#;

const FISH: &str = r#"# Completions of @PROGRAM@ for fish.
function __complete@FUNCTION@
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    set -l at (math (count $words) - 1)
    for line in (@ASKED@ __complete @PROGRAM@ $at $words[2..-1] "$typed" 2>/dev/null)
        switch $line
            case ':files'
                __fish_complete_path "$typed"
            case ':folders'
                __fish_complete_directories "$typed"
            case ':*'
            case '*'
                echo $line
        end
    end
end
complete -c @PROGRAM@ -f -a '(__complete@FUNCTION@)'
"#;
