# Give the tree in a working directory a history of one commit, and make any other history unreachable.
#
# Runs inside the sandbox, before the agent, with nothing but a POSIX shell, git and the usual small programs.
# Arguments: working directory, base commit or "", directory for files that are put aside, their names.
# Prints, NUL-terminated: files that differ from the base commit; files of no commit; repositories further down; the
# new commit. An empty record ends each list.
set -eu

NO_GIT=81 NO_TREE=82 NO_COMMIT=83 NO_CHECKOUT=84 NO_PACK=85

work=$1 base=$2 aside=$3
shift 3
command -v git >/dev/null 2>&1 || exit $NO_GIT
cd "$work" 2>/dev/null || exit $NO_TREE
work=$(pwd -P)

for name in "$@"; do
    if [ -e "$name" ] || [ -L "$name" ]; then
        mkdir -p "$aside"
        rm -rf "${aside:?}/$name"
        mv "$name" "$aside/$name"
    fi
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_CONFIG_COUNT
export HOME="$scratch" GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1
export GIT_TERMINAL_PROMPT=0 LC_ALL=C
# The same in every sandbox, so that replicas see the same commit.
export GIT_AUTHOR_NAME=base GIT_AUTHOR_EMAIL=base@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=base GIT_COMMITTER_EMAIL=base@localhost GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'

# A repository without hooks, filters or remotes: all work is done with it, never with the configuration of the image.
make_repository() {
    git -c init.defaultBranch=main init -q --template= "$1"
    mkdir -p "$1/.git/info"
    printf 'ref: refs/heads/main\n' >"$1/.git/HEAD"
}

# Whether a directory may be removed: not the root, and the working directory is not in it.
removable() {
    case $1 in /*) ;; *) return 1 ;; esac
    [ -d "$1" ] || return 1
    case $work/ in "$(cd "$1" && pwd -P)"/* | //*) return 1 ;; esac
    [ "$(cd "$1" && pwd -P)" != / ]
}

absolute() {
    case $1 in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$2" "$1" ;; esac
}

# Print the object directories that one borrows from, and those that they borrow from.
alternates() {
    [ -f "$1/info/alternates" ] && [ "$2" -lt 6 ] || return 0
    while IFS= read -r line; do
        case $line in '' | '#'*) continue ;; esac
        borrowed=$(absolute "$line" "$1")
        printf '%s\n' "$borrowed"
        (alternates "$borrowed" $(($2 + 1)))
    done <"$1/info/alternates"
}

old=
if [ -d .git ]; then
    old=$work/.git
elif [ -f .git ]; then
    old=$(absolute "$(sed -n 's/^gitdir: //p' .git)" "$work")
fi
make_repository "$scratch/new"
new=$scratch/new/.git
doomed=

if [ -n "$old" ] && GIT_DIR=$old git rev-parse --git-dir >/dev/null 2>&1; then
    common=$(absolute "$(GIT_DIR=$old git rev-parse --git-common-dir)" "$work")
    objects=$common/objects
    make_repository "$scratch/read"
    read=$scratch/read/.git
    printf '%s\n' "$objects" >"$read/objects/info/alternates"
    for file in "$old/index" "$old"/sharedindex.* "$common/info/exclude" "$common/shallow"; do
        [ -f "$file" ] || continue
        case $file in
        */info/exclude)
            cp "$file" "$read/info/exclude"
            cp "$file" "$new/info/exclude"
            ;;
        *) cp "$file" "$read/" ;;
        esac
    done
    head=$(GIT_DIR=$old git rev-parse -q --verify 'HEAD^{commit}') || head=
    export GIT_DIR="$read" GIT_WORK_TREE="$work"
    if [ -n "$base" ]; then
        commit=$(git rev-parse -q --verify "$base^{commit}") || exit $NO_COMMIT
        # The builders of SWE-bench's images commit what they changed to make the tests run: it belongs to the base.
        if [ "$head" != "$commit" ] && [ "$(git log -1 --format=%P:%s "$head" 2>/dev/null)" != "$commit:SWE-bench" ]; then
            git reset -q --hard "$commit" >&2 || exit $NO_CHECKOUT
        fi
    else
        commit=$head
    fi
    # Index flags that make git skip a file would hide changes by the image or the agent.
    for mark in --no-assume-unchanged --no-skip-worktree; do
        git ls-files -z | git update-index -z $mark --stdin
    done
    git update-index -q --refresh >/dev/null 2>&1 || :
    if [ -n "$commit" ]; then git diff-index -z --name-only "$commit" --; else git ls-files -z; fi
    printf '\0'
    git ls-files -z --others --exclude-standard --directory --no-empty-directory
    printf '\0'
    git add -u . >&2
    tree=$(git write-tree)
    first=$(git commit-tree "$tree" -m Base </dev/null)
    printf '%s\n' "$first" | git pack-objects -q --revs --window=0 "$new/objects/pack/pack" >/dev/null || exit $NO_PACK
    # Submodules: their repositories were inside the removed one, and git would fail on what points there.
    git ls-files -s | sed -n 's/^160000 [0-9a-f]* [0-9]	//p' | while IFS= read -r module; do rm -rf "${work:?}/$module/.git"; done
    # Other places that hold objects or files of later commits.
    for link in "$common"/worktrees/*/gitdir; do
        if [ -f "$link" ]; then
            doomed="$doomed
$(dirname "$(cat "$link")")"
        fi
    done
    doomed="$doomed
$(alternates "$objects" 0)"
    if [ "$common" != "$work/.git" ]; then
        if [ "$(basename "$common")" = .git ]; then
            doomed="$doomed
$(dirname "$common")"
        fi
        doomed="$doomed
$common"
    fi
    export GIT_DIR="$new"
    printf '%s\n' "$first" >"$new/refs/heads/main"
    # Keep the list of files, so that git need not read them again.
    if [ -f "$read/index" ]; then cp "$read/index" "$new/index"; else git read-tree "$first"; fi
    git update-index -q --no-split-index --no-untracked-cache
    git update-index -q --refresh >/dev/null 2>&1 || :
else
    [ -z "$base" ] || exit $NO_COMMIT
    [ -n "$(ls -A)" ] || exit $NO_TREE
    printf '\0\0'
    rm -rf .git
    export GIT_DIR="$new" GIT_WORK_TREE="$work"
    git add -A -f . >&2
    first=$(git commit-tree "$(git write-tree)" -m Base </dev/null)
    printf '%s\n' "$first" >"$new/refs/heads/main"
fi

printf '%s\n' "$doomed" | while IFS= read -r place; do
    if [ -n "$place" ] && removable "$place"; then rm -rf "$place"; fi
done
rm -rf "${work:?}/.git"
git config user.name agent
git config user.email agent@localhost
git config gc.auto 0
unset GIT_DIR GIT_WORK_TREE
mv "$new" "$work/.git"
find . -xdev -mindepth 2 -name .git -print0
printf '\0%s\0' "$first"
