// Observable values that several components share.

import { useEffect, useState } from './html.js';

export class Store {
  constructor(value) {
    this.value = value;
    this.listeners = new Set();
  }

  set(value) {
    if (Object.is(value, this.value)) return;
    this.value = value;
    for (const listener of [...this.listeners]) listener(value);
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

export function useStore(store) {
  const [value, setValue] = useState(store.value);
  useEffect(() => {
    setValue(() => store.value);
    return store.subscribe((changed) => setValue(() => changed));
  }, [store]);
  return value;
}
