SELECT count(jq.dispatch('one_row', bench.payload())) FROM generate_series(1, 100);
