SELECT jq.dispatch('pick_up', jsonb_build_object('at', extract(epoch FROM clock_timestamp())));
\sleep 10 ms
