# Shared by script/demo, script/test and script/matrix, which source it:
# finds PostgreSQL, builds jq for it, and runs private servers.
#
# Nothing is installed into the system but Debian packages that are missing.
# PostgreSQL finds its files relative to its programs, so a copy of the
# installation in a temporary directory is a whole PostgreSQL of its own: jq
# goes into that copy, next to whatever jq the machine may have, without
# root, and two runs at a time do not get in each other's way.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
keep=no

# The caller's own connection settings and language must not leak in.
unset PGDATABASE PGHOST PGHOSTADDR PGPORT PGUSER PGPASSWORD PGPASSFILE \
	PGSERVICE PGSERVICEFILE PGOPTIONS PGAPPNAME PGSSLMODE PGDATA PGTZ \
	PGDATESTYLE PGCLIENTENCODING PGCONNECT_TIMEOUT LANGUAGE
export LC_ALL=C.UTF-8

die() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# Prints the comment at the top of a script, which is its manual.
usage() {
	sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
}

is_root() {
	[[ $EUID -eq 0 ]]
}

# --- what must be there ----------------------------------------------------

# install_packages NAME...: by apt-get when we may, else says what is missing.
install_packages() {
	if ! is_root || ! command -v apt-get >/dev/null; then
		die "missing: $*; install these packages, or run this as root on Debian"
	fi
	echo "Installing $*" >&2
	export DEBIAN_FRONTEND=noninteractive
	apt-get -qq update >&2 || true
	apt-get -qq install --no-install-recommends "$@" >&2 </dev/null ||
		die "could not install $*"
}

# has_headers PG_CONFIG: whether extensions can be built with it.
has_headers() {
	[[ -x $1 && -f $("$1" --includedir-server)/postgres.h && -f $("$1" --pgxs) ]]
}

# Sets PG_CONFIG: the caller's, else PostgreSQL 15, else the newest one.
choose_pg_config() {
	local candidate
	[[ -z ${PG_CONFIG:-} ]] || return 0
	for candidate in /usr/lib/postgresql/15/bin/pg_config \
		$(ls -d /usr/lib/postgresql/*/bin/pg_config 2>/dev/null | sort -rV); do
		if has_headers "$candidate" && [[ -x ${candidate%/*}/postgres ]]; then
			PG_CONFIG=$candidate
			return 0
		fi
	done
	if candidate=$(command -v pg_config) && has_headers "$candidate" &&
		[[ -x $("$candidate" --bindir)/postgres ]]; then
		PG_CONFIG=$candidate
	fi
}

# The major version that this Debian release offers, 15 if it has that.
packaged_major() {
	if apt-cache show postgresql-server-dev-15 >/dev/null 2>&1; then
		echo 15
	else
		apt-cache depends postgresql 2>/dev/null |
			sed -n 's/.*Depends: postgresql-\([0-9]*\)$/\1/p' | head -n 1
	fi
}

# find_postgres [test]: sets PG_CONFIG and pg_major, and installs what is
# missing to build, or to build and test.
find_postgres() {
	local major packages=()

	choose_pg_config
	if [[ -z ${PG_CONFIG:-} ]]; then
		is_root && command -v apt-get >/dev/null ||
			die "no PostgreSQL with server headers found; install postgresql and postgresql-server-dev, or set PG_CONFIG"
		apt-get -qq update >&2 || true
		major=$(packaged_major)
		[[ -n $major ]] || die "no package of PostgreSQL found; set PG_CONFIG"
		install_packages "postgresql-$major" "postgresql-server-dev-$major"
		PG_CONFIG=/usr/lib/postgresql/$major/bin/pg_config
	fi
	has_headers "$PG_CONFIG" ||
		die "$PG_CONFIG has no server headers; install postgresql-server-dev of its version"

	command -v make >/dev/null || packages+=(make)
	command -v gcc >/dev/null || packages+=(gcc libc6-dev)
	if [[ ${1:-} == test ]]; then
		command -v prove >/dev/null || packages+=(perl)
		perl -MIPC::Run -e 1 2>/dev/null || packages+=(libipc-run-perl)
	fi
	[[ ${#packages[@]} -eq 0 ]] || install_packages "${packages[@]}"
	[[ ${1:-} != test ]] || install_languages

	PG_CONFIG=$(realpath "$PG_CONFIG")
	pg_major=$("$PG_CONFIG" --version | sed 's/[^0-9]*\([0-9]*\).*/\1/')
}

# Other procedural languages, where Debian has them; the tests of handlers in
# them are skipped where it has not.
install_languages() {
	local name lib packages=()
	local major=$("$PG_CONFIG" --version | sed 's/[^0-9]*\([0-9]*\).*/\1/')

	is_root && command -v apt-get >/dev/null || return 0
	[[ $("$PG_CONFIG" --bindir) == /usr/lib/postgresql/* ]] || return 0
	lib=$("$PG_CONFIG" --pkglibdir)
	for name in plperl plpython3 pltcl; do
		if [[ ! -f $lib/$name.so ]] &&
			apt-cache show "postgresql-$name-$major" >/dev/null 2>&1; then
			packages+=("postgresql-$name-$major")
		elif [[ ! -f $lib/$name.so ]] &&
			apt-cache show "postgresql-$name" >/dev/null 2>&1; then
			packages+=("postgresql-$name")
		fi
	done
	[[ ${#packages[@]} -eq 0 ]] || (install_packages "${packages[@]}") ||
		echo "Going on without ${packages[*]}" >&2
}

# --- a place to work -------------------------------------------------------

# The server refuses to run as root.  As root, everything that builds or runs
# is done by an unprivileged user instead.
choose_user() {
	as=()
	if is_root; then
		server_user=postgres
		id -u postgres >/dev/null 2>&1 || server_user=nobody
		as=(runuser -u "$server_user" --)
	else
		server_user=$(id -un)
	fi
}

# Sets work, a new directory of the server's user that goes away on exit.
make_workdir() {
	local parent=${TMPDIR:-/tmp}

	# the path of a Unix socket must be shorter than 108 bytes
	[[ ${#parent} -le 70 ]] || parent=/tmp
	choose_user
	work=$(mktemp -d "$parent/jq.XXXXXX")
	trap cleanup EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM
	! is_root || chown "$server_user" "$work"
	"${as[@]}" test -w "$work" 2>/dev/null ||
		die "user $server_user cannot work in $parent; set TMPDIR to a directory that it can enter"
}

cleanup() {
	local status=$?
	trap - EXIT INT TERM
	if [[ $keep == no ]]; then
		stop_server
		rm -rf "$work"
	fi
	exit "$status"
}

# as_server COMMAND...: in the work directory, as the server's user.
as_server() {
	(cd "$work" && "${as[@]}" env HOME="$work" PATH="${bindir:+$bindir:}$PATH" "$@")
}

# --- building --------------------------------------------------------------

# copy_tree DIRECTORY: the sources, without what a build or git leaves there.
copy_tree() {
	mkdir -p "$1"
	tar -C "$root" --exclude=./.git --exclude='*.o' --exclude='*.bc' \
		--exclude='*.so' --exclude=./tmp_check --exclude=./tmp_check_iso \
		--exclude=./results --exclude=./output_iso -cf - . |
		tar -C "$1" --no-same-owner -xf -
}

# Copies PostgreSQL into the work directory and points PG_CONFIG there.
copy_postgres() {
	local copy=$work/pg what dir

	for what in bindir pkglibdir sharedir; do
		dir=$("$PG_CONFIG" "--$what")
		as_server mkdir -p "$copy$dir"
		as_server cp -a "$dir/." "$copy$dir/"
	done
	# never written to: links will do
	for what in includedir pkgincludedir includedir-server libdir; do
		dir=$("$PG_CONFIG" "--$what")
		if [[ -d $dir && ! -e $copy$dir ]]; then
			as_server mkdir -p "$copy${dir%/*}"
			as_server ln -s "$dir" "$copy$dir"
		fi
	done
	dir=$("$PG_CONFIG" --sharedir)
	PG_CONFIG=$copy$("$PG_CONFIG" --bindir)/pg_config
	[[ $("$PG_CONFIG" --sharedir) == "$copy$dir" ]] ||
		die "this PostgreSQL does not find its files when it is copied; use one that does"
}

# build_jq [MAKE-ARGUMENT...]: builds jq in $work/src and installs it into
# $work/pg; what make says goes to $work/build.log.  With JQ_NO_BUILD set, the
# PostgreSQL of PG_CONFIG is used as it is: it has jq already.
build_jq() {
	if [[ -z ${JQ_NO_BUILD:-} ]]; then
		copy_postgres
		copy_tree "$work/src"
		! is_root || chown -R "$server_user" "$work/src"
		bindir=$("$PG_CONFIG" --bindir)
		as_server make -C src PG_CONFIG="$PG_CONFIG" "$@" >"$work/build.log" 2>&1 &&
			as_server make -C src PG_CONFIG="$PG_CONFIG" install "$@" >>"$work/build.log" 2>&1 || {
			cat "$work/build.log"
			return 1
		}
	fi
	bindir=$("$PG_CONFIG" --bindir)
}

# --- a private server ------------------------------------------------------

# start_server [SETTING...]: a new server that only its own socket directory
# leads to; sets PGHOST, PGPORT and PGUSER for all that follows.
start_server() {
	local setting

	as_server initdb -D "$work/data" -U postgres -A trust -E UTF8 --locale=C.UTF-8 \
		>"$work/initdb.log" 2>&1 || {
		cat "$work/initdb.log"
		die "could not create a server"
	}
	# the port is only part of the socket's name here
	for setting in "listen_addresses = ''" "unix_socket_directories = '$work'" \
		"port = 5432" "shared_preload_libraries = 'jq'" "$@"; do
		echo "$setting" >>"$work/data/postgresql.conf"
	done
	as_server pg_ctl -D "$work/data" -l "$work/server.log" -w start >/dev/null || {
		tail -n 20 "$work/server.log"
		die "could not start a server"
	}
	export PGHOST=$work PGPORT=5432 PGUSER=postgres
}

stop_server() {
	if [[ -f $work/data/postmaster.pid ]]; then
		as_server pg_ctl -D "$work/data" -m immediate -w stop >/dev/null || true
	fi
}

# sql ARGUMENT...: psql that stops at the first error.
sql() {
	"$bindir/psql" -X -q -v ON_ERROR_STOP=1 "$@"
}
