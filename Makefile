# jq: a job queue inside PostgreSQL
#
#   make && make install && make installcheck
#
# installcheck runs the regression and isolation tests against the running
# server that psql would reach.  That server needs shared_preload_libraries =
# 'jq' for the isolation tests; script/test makes private servers that have it.

MODULE_big = jq
EXTENSION = jq
DATA = jq--1.0.sql
PGFILEDESC = "jq - job queue inside PostgreSQL"

OBJS = $(patsubst %.c,%.o,$(sort $(wildcard src/*.c)))

REGRESS = $(patsubst sql/%.sql,%,$(sort $(wildcard sql/*.sql)))
ISOLATION = $(patsubst specs/%.spec,%,$(sort $(wildcard specs/*.spec)))
ISOLATION_OPTS = --load-extension=jq
TAP_TESTS = 1

PG_CFLAGS = -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

$(OBJS): $(wildcard src/*.h)
