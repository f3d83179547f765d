SELECT jq.dispatch('noop', :payload);
