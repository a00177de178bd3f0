local value = call('GET', LOCK)
