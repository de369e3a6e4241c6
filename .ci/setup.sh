#!/bin/sh
# The set-up of a checkout. Run by make; safe to run again; quick when there is nothing to do.
#
#   .ci/setup.sh demo           .venv with what the demo needs, and a Vulkan driver
#   .ci/setup.sh test           .venv with all development tools, a Vulkan driver, SwiftShader
#   .ci/setup.sh check          .venv with all development tools
#   .ci/setup.sh system PART... system packages, as root; PART: python, venv-X.Y, loader, driver
#
# Only `system` changes anything outside .venv. The other forms call it themselves as root or where
# sudo asks no password; otherwise they print the command and stop. Each change is announced first.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
venv=.venv
swiftshader=$venv/share/swiftshader

good_mesa=25         # older lavapipe leaves loops early, silently: wrong results, no error
oldest_python=3.10   # as in pyproject.toml; pip would refuse too, but later and less clearly
newest_python=3.14   # the newest one that is looked for by name

say() { printf 'setup: %s\n' "$*"; }
warn() { printf 'setup: %s\n' "$*" >&2; }
die() { warn "$*"; exit 1; }

# ---- what is here --------------------------------------------------------------------------------

os_release() { # FIELD -> its value, '' where unknown
    # shellcheck disable=SC1091
    [ ! -r /etc/os-release ] || (. /etc/os-release && eval "printf '%s' \"\${$1:-}\"")
}

has() { command -v "$1" >/dev/null 2>&1; }

minor_versions() { # newest first: 3.14 3.13 ...
    minor=${newest_python#3.}
    while [ "$minor" -ge "${oldest_python#3.}" ]; do
        echo "3.$minor"
        minor=$((minor - 1))
    done
}

find_python() { # -> a new enough interpreter, '' if there is none
    if [ -n "${PYTHON:-}" ]; then
        candidates=$PYTHON
    else # python3 may be older than another one that is here too
        candidates="python3 $(minor_versions | sed 's/^/python/')"
    fi
    for candidate in $candidates; do
        if "$candidate" -c "import sys
sys.exit(sys.version_info < (3, ${oldest_python#3.}))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

vulkan_files() { # all that decides which drivers the loader finds
    ls -lL /etc/vulkan/icd.d /usr/share/vulkan/icd.d /usr/local/share/vulkan/icd.d \
        /usr/lib/*/libvulkan.so.1 /usr/lib*/libvulkan.so.1 2>/dev/null || true
    echo "${VK_DRIVER_FILES:-} ${VK_ICD_FILENAMES:-}"
}

probe_driver() { # -> 'gpu NAME', 'software NAME', 'old NAME' (lavapipe before $good_mesa) or 'none'
    # wgpu itself is asked, since a driver that wgpu cannot use is no driver to us.
    "$venv/bin/python" - "$good_mesa" 2>/dev/null <<'PYTHON' || echo none
import re
import sys

import wgpu

best = (0, "none")
for adapter in wgpu.gpu.enumerate_adapters_sync():
    info = adapter.info
    if info["backend_type"] not in ("Vulkan", "Metal"):
        continue
    name = f"{info['device']}, {info['description']}"
    mesa = re.search(r"Mesa (\d+)", info["description"])
    if info["adapter_type"] != "CPU":
        found = (3, f"gpu {name}")
    elif mesa and int(mesa[1]) < int(sys.argv[1]):
        found = (1, f"old {name}")
    else:
        found = (2, f"software {name}")
    best = max(best, found)
print(best[1])
PYTHON
}

has_vulkan_loader() {
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libvulkan.so.1")' 2>/dev/null
}

has_icd() { # is any Vulkan driver installed, usable or not?
    for icd in /etc/vulkan/icd.d/*.json /usr/share/vulkan/icd.d/*.json; do
        [ ! -f "$icd" ] || return 0
    done
    return 1
}

# ---- system packages: the only part that needs root -----------------------------------------------

package_candidate() { # PACKAGE -> the version that apt would install, '' if none
    LC_ALL=C apt-cache policy "$1" 2>/dev/null |
        sed -n 's/^ *Candidate: *//p' | grep -v '(none)' || true
}

mesa_candidate() { # -> the major version that apt would install, 0 if none
    major=$(package_candidate mesa-vulkan-drivers | sed 's/[^0-9].*//')
    echo "${major:-0}"
}

quietly() { # COMMAND...: its output is shown only where it fails
    log=$(mktemp)
    if "$@" >"$log" 2>&1; then
        rm -f "$log"
    else
        cat "$log" >&2
        rm -f "$log"
        return 1
    fi
}

apt() { # waits for a lock that an automatic upgrade may hold; asks nothing
    quietly env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 "$@"
}

refresh_lists() { # at most once a run
    [ -z "${refreshed:-}" ] || return 0
    refreshed=yes
    say 'system change: apt-get update (package lists)'
    apt update || warn 'apt-get update failed in part; going on with the lists that are there'
}

apt_install() { # [-t SUITE] PACKAGE...
    say "system change: apt-get install $*"
    apt install -y --no-install-recommends "$@" && return
    refresh_lists # lists that are too old name packages that are gone
    apt install -y --no-install-recommends "$@" || die "apt-get install $* failed (see above)"
}

system_python() { # no interpreter, or only ones that are too old
    # An installed package has a candidate without any lists; one that is not installed has none.
    [ -n "$(new_python)" ] || refresh_lists
    version=$(new_python)
    [ -n "$version" ] ||
        die "this distribution has no Python $oldest_python or newer; set PYTHON to one of your own"
    apt_install "python$version" "python$version-venv"
}

new_python() { # -> X.Y, the distribution's own choice if that is new enough, else its newest
    for version in $(package_candidate python3 | sed 's/^\([0-9]*\.[0-9]*\).*/\1/') $(minor_versions); do
        if [ "${version#3.}" -ge "${oldest_python#3.}" ] &&
            [ -n "$(package_candidate "python$version-venv")" ]; then
            echo "$version"
            return
        fi
    done
}

system_venv() { # VERSION: Debian and Ubuntu keep ensurepip, which venv needs, in a package of its own
    [ -n "$(package_candidate "python$1-venv")" ] || refresh_lists
    [ -n "$(package_candidate "python$1-venv")" ] ||
        die "Python $1 lacks ensurepip, and there is no package python$1-venv; set PYTHON to another"
    apt_install "python$1-venv"
}

system_loader() { apt_install libvulkan1; }

backports_stanza() { # SUITE -> 'EXTENSION' and the machine's own Debian entry, turned to SUITE-backports
    for file in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/*.sources; do
        [ -r "$file" ] || continue
        stanza=$(awk -v suite="$1" '
            BEGIN { RS = ""; FS = "\n" }
            {
                text = ""; wanted = 0; off = 0; main = 0
                for (i = 1; i <= NF; i++) {
                    line = $i
                    if (line ~ /^#/) continue
                    if (tolower(line) ~ /^enabled: *no/) off = 1
                    if (line ~ /^Components:.* main( |$)/) main = 1
                    if (line ~ /^Suites:/) {
                        if ((line " ") ~ (" " suite " ")) wanted = 1
                        line = "Suites: " suite "-backports"
                    }
                    text = text line "\n"
                }
                if (wanted && main && !off) { printf "%s", text; exit }
            }' "$file")
        [ -z "$stanza" ] || { printf 'sources\n%s\n' "$stanza"; return; }
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -r "$file" ] || continue
        line=$(sed -n "/^deb[[:space:]]*cdrom:/d
            s/^\(deb[[:space:]].*[[:space:]]\)$1\([[:space:]].*main.*\)/\1$1-backports\2/p" "$file" |
            head -n 1)
        [ -z "$line" ] || { printf 'list\n%s\n' "$line"; return; }
    done
}

add_backports() { # SUITE: makes SUITE-backports known to apt; false where that is not possible
    ! LC_ALL=C apt-cache policy | grep -q "n=$1-backports," || return 0
    entry=$(backports_stanza "$1")
    [ -n "$entry" ] || { warn "found no apt entry for $1 to derive $1-backports from"; return 1; }
    file=/etc/apt/sources.list.d/wgpuconv-backports.$(echo "$entry" | head -n 1)
    say "system change: new file $file, $1-backports from the same server as $1"
    say '  (apt takes from backports only what is asked for by name, now and on upgrades)'
    echo "$entry" | tail -n +2 >"$file"
    # Only the new list is fetched; the others stay as they are.
    say "system change: apt-get update ($1-backports only)"
    apt update -o Dir::Etc::sourcelist="$file" -o Dir::Etc::sourceparts=- \
        -o APT::Get::List-Cleanup=0 || true
    LC_ALL=C apt-cache policy | grep -q "n=$1-backports," && return
    warn "the server of $1 has no $1-backports: removing $file"
    rm -f "$file"
    return 1
}

system_driver() { # a software Vulkan driver, the newest Mesa that the distribution itself offers
    [ "$(mesa_candidate)" -ge "$good_mesa" ] || refresh_lists
    if [ "$(mesa_candidate)" -lt "$good_mesa" ] && [ "$(os_release ID)" = debian ]; then
        suite=$(os_release VERSION_CODENAME)
        if add_backports "$suite"; then
            apt_install -t "$suite-backports" libvulkan1 mesa-vulkan-drivers
            return
        fi
    fi
    [ "$(mesa_candidate)" -gt 0 ] || die 'apt has no package mesa-vulkan-drivers'
    apt_install libvulkan1 mesa-vulkan-drivers
}

system() { # PART...
    [ "$(id -u)" -eq 0 ] || die "'system' needs root"
    for part in "$@"; do
        case $part in
        python | loader | driver) "system_$part" ;;
        venv-*) system_venv "${part#venv-}" ;;
        *) die "unknown part: $part" ;;
        esac
    done
}

describe() { # PART
    case $1 in
    python) echo "Python $oldest_python or newer" ;;
    venv-*) echo "ensurepip for Python ${1#venv-}, which venv needs" ;;
    loader) echo 'the Vulkan loader (libvulkan1)' ;;
    driver) echo "a Vulkan driver: a GPU's, or the software one of Mesa $good_mesa or newer" ;;
    esac
}

as_root() { # PART...
    if ! has apt-get; then
        die "needed from your system's package manager: $* (driver: a Vulkan driver and its loader;" \
            "Mesa $good_mesa or newer has a software one, called lavapipe)"
    elif [ "$(id -u)" -eq 0 ]; then
        system "$@"
    elif has sudo && sudo -n true 2>/dev/null; then
        sudo -n sh "$here/.ci/setup.sh" system "$@"
    else
        # The driver is asked for in the same breath where it is plain already that there is none.
        case " $* " in *' driver '*) ;; *) has_icd || [ "$mode" = check ] || set -- "$@" driver ;; esac
        if has sudo; then root="sudo sh '$here/.ci/setup.sh' system $*"
        else root="su -c \"sh '$here/.ci/setup.sh' system $*\""; fi
        warn 'missing on this system:'
        for part in "$@"; do warn "  - $(describe "$part")"; done
        warn 'Installing it needs root. Run this one command, then make again:'
        warn "  $root"
        exit 1
    fi
}

# ---- steps ----------------------------------------------------------------------------------------

make_venv() {
    # One that lost its interpreter or was moved (scripts in it hold its path) is made anew.
    if grep -qF "$here/$venv" "$venv/bin/activate" 2>/dev/null &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python)
    if [ -z "$python" ]; then
        [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is missing or older than $oldest_python"
        as_root python
        python=$(find_python)
        [ -n "$python" ] || die "no Python $oldest_python or newer found"
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        as_root "venv-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    fi
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

install_package() { # EXTRA
    say "installing wgpuconv[$1] into $venv, editable"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$1]"
}

explain_old_driver() { # NAME
    warn "software Vulkan driver: $1"
    warn "  Mesa before $good_mesa miscompiles long loops (over 65,535 iterations an invocation), and"
    warn '  this distribution offers no newer one. Tests that meet it may fail or skip, and wgpuconv'
    warn '  warns when it runs. What helps: a newer release of the distribution, a real GPU, or a'
    warn '  newer Mesa from a source that you choose and add yourself.'
}

newer_mesa_possible() {
    has apt-get || return 1
    [ "$(mesa_candidate)" -ge "$good_mesa" ] || [ "$(os_release ID)" = debian ]
}

ensure_driver() {
    found=$(probe_driver)
    if [ "$found" = none ] && [ -n "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ]; then
        die 'wgpu finds no Vulkan driver, and VK_DRIVER_FILES or VK_ICD_FILENAMES hides all but' \
            "'${VK_DRIVER_FILES:-$VK_ICD_FILENAMES}': unset it or correct it"
    fi
    if [ "$found" = none ] && has_icd && ! has_vulkan_loader; then
        as_root loader # a GPU's driver may be there and only the loader missing
        found=$(probe_driver)
    fi
    case $found in
    none) as_root driver ;;
    old*) if newer_mesa_possible; then as_root driver; fi ;;
    esac
    case $found in none | old*) found=$(probe_driver) ;; esac
    case $found in
    none) die 'wgpu still finds no Vulkan driver; this says more:' \
        "$venv/bin/python -c 'import wgpu; wgpu.diagnostics.print_report()'" ;;
    old*) explain_old_driver "${found#old }" ;;
    gpu*) say "GPU: ${found#gpu }" ;;
    *) say "software Vulkan driver: ${found#software }" ;;
    esac
}

fetch_swiftshader() { # a second software driver, unpacked into .venv: no system change
    [ ! -f "$swiftshader/vk_swiftshader_icd.json" ] || return 0
    skipped='SwiftShader skipped (tests marked swiftshader will skip):'
    if ! has apt-get || ! has dpkg-deb; then
        say "$skipped no apt here to take it from"
        return
    fi
    if [ -z "$(package_candidate chromium-common)" ] && [ "$(os_release ID)" = debian ] &&
        [ "$(id -u)" -eq 0 ]; then
        refresh_lists
    fi
    if [ -z "$(package_candidate chromium-common)" ]; then
        say "$skipped apt offers no package chromium-common, which Debian's SwiftShader comes in"
        return
    fi
    say 'fetching SwiftShader out of the package chromium-common (unpacked, not installed)'
    work=$venv/share/swiftshader.part
    rm -rf "$work"
    mkdir -p "$work"
    if (cd "$work" && quietly apt-get download chromium-common) &&
        dpkg-deb --fsys-tarfile "$work"/*.deb | tar -x -C "$work" --strip-components=4 \
            ./usr/lib/chromium/libvk_swiftshader.so ./usr/lib/chromium/vk_swiftshader_icd.json; then
        rm -f "$work"/*.deb
        rm -rf "$swiftshader"
        mv "$work" "$swiftshader"
    else
        rm -rf "$work"
        say "$skipped the package could not be fetched or holds no SwiftShader (see above)"
    fi
}

# A step runs again when what decides its outcome has changed since it last succeeded.
current() { [ -f "$venv/.stamp-$1" ] && [ "$(cat "$venv/.stamp-$1")" = "$2" ]; }
record() { printf '%s\n' "$2" >"$venv/.stamp-$1"; }

main() {
    mode=${1:-}
    case $mode in
    demo) extra=image ;;
    test | check) extra=dev ;; # has all of `image`
    system) shift; system "$@"; return ;;
    *) die 'usage: .ci/setup.sh demo|test|check|system PART...' ;;
    esac

    sources=$( (echo "$here"; cat pyproject.toml .ci/setup.sh) | cksum)
    if ! current dev "$sources" && ! current "$extra" "$sources"; then
        make_venv
        install_package "$extra"
        record "$extra" "$sources"
    fi
    [ "$mode" != check ] || return 0

    drivers=$( (vulkan_files; echo "$sources") | cksum)
    if ! current driver "$drivers"; then
        ensure_driver
        record driver "$( (vulkan_files; echo "$sources") | cksum)" # the step may have changed them
    fi
    [ "$mode" != test ] || fetch_swiftshader
}

main "$@"
