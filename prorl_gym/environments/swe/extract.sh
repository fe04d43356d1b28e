# Print what changed in a working directory since the repository was put in place, as a patch.
#
# Runs inside the agent's sandbox after the agent. The agent's .git only provides objects, which git knows by their
# content; the base and every setting are read from a directory that was written just before.
# Arguments: working directory; that directory, with `index`, `exclude`, `nested` and perhaps `base.pack`; sizes in KiB
# from which new files, and any files, are left out; number of text files from which a new directory is. Of that only a
# head is printed, with a directory's mode.
set -u

FAILED=91

work=$1 own=$2 large_new=$3 large=$4 many=$5
cd "$work" || exit $FAILED
unset GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_CONFIG_COUNT GIT_CONFIG_PARAMETERS GIT_EXTERNAL_DIFF GIT_DIFF_OPTS
export HOME="$own" GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1
export GIT_DIR="$own" GIT_WORK_TREE="$work" GIT_INDEX_FILE="$own/index" GIT_TERMINAL_PROMPT=0 GIT_PAGER=cat LC_ALL=C

mkdir -p "$own/objects/info" "$own/objects/pack" "$own/refs/heads" "$own/info" || exit $FAILED
printf 'ref: refs/heads/none\n' >"$own/HEAD"
printf '[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tquotePath = false\n' >"$own/config" || exit $FAILED
printf '%s\n' "$work/.git/objects" >"$own/objects/info/alternates"
# The content decides which files are text, not the tree's attributes.
printf '* !diff !filter\n' >"$own/info/attributes"
cp "$own/exclude" "$own/info/exclude" || exit $FAILED
if [ -f "$own/base.pack" ]; then
    rm -f "$own/objects/info/alternates"
    git index-pack --stdin <"$own/base.pack" >/dev/null || exit $FAILED
fi

# A repository that the agent made in a subdirectory would hide the files below it.
find . -xdev -mindepth 2 -name .git -prune -print 2>/dev/null | while IFS= read -r path; do
    grep -Fxq -e "${path#./}" "$own/nested" || rm -rf "$path"
done
find . -xdev -path ./.git -prune -o -type f -size "+${large_new}k" -print 2>/dev/null |
    sed 's/[][*?\\!# ]/\\&/g; s#^\./#/#' >>"$own/info/exclude" # which does not affect files of the base
# What a package manager left, for example. A name that git would quote is not looked for.
git ls-files --others --exclude-standard --directory --no-empty-directory | sed -n '/^"/!s#/$##p' | head -n 100 |
    while IFS= read -r directory; do
        found=$(git --literal-pathspecs ls-files -z --others --exclude-standard -- "$directory" |
            xargs -0 grep -lIs '' -- /dev/null 2>/dev/null | head -n "$many" | wc -l)
        [ "$found" -ge "$many" ] || continue
        printf '/%s/\n' "$directory" | sed 's/[][*?\\!# ]/\\&/g' >>"$own/info/exclude"
        printf 'diff --git a/%s b/%s\nnew file mode 040000\n' "$directory" "$directory" >>"$own/directories"
    done
git add -N --ignore-removal --ignore-errors -- . >/dev/null 2>&1
find . -xdev -path ./.git -prune -o -type f -size "+${large}k" -exec git update-index --force-remove -- {} \; >/dev/null 2>&1
git diff --no-ext-diff --no-textconv --no-color --no-renames --full-index --ignore-submodules=all --submodule=short \
    --src-prefix=a/ --dst-prefix=b/ -U3 -- . || exit
[ ! -e "$own/directories" ] || cat "$own/directories"
