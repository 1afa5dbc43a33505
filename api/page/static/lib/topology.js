// What the document of a job says of the parts of its ranks, and of how these keep their models in step.

import { plural } from './format.js';

// In a few words; null of a job whose ranks do what most do: average their gradients in each step.
export function topologyOf({ federated, sync, script }) {
  if (federated) {
    const { algorithm, silos, clients, http } = federated;
    const taking = silos ? plural(silos.length, 'silo') : `${plural(clients, 'client')}${http ? ' outside of the cluster' : ''}`;
    return `federated, ${algorithm}, ${taking}`;
  }
  if (sync?.kind === 'gossip') return `gossip, ${sync.mode}, ${sync.graph}`;
  if (sync?.kind === 'parameter_server') return `${plural(sync.servers, 'parameter server')}, ${sync.mode}`;
  const roles = Object.entries(script?.roles ?? {});
  if (roles.length) return roles.map(([name, { num_workers: count }]) => `${count} ${name}`).join(', ');
  return sync?.every > 1 ? `local steps, averaged every ${sync.every}` : null;
}

// What a rank is and which of these, as `ps 0`, where not all do the same; else null.
export function roleOf({ federated, sync, script, resources }, rank) {
  if (sync?.kind === 'parameter_server') {
    const number = rank - resources.num_workers + sync.servers;
    return number < 0 ? null : `server ${number}`;
  }
  if (federated?.silos) return rank === 0 ? 'aggregator' : `silo ${federated.silos[rank - 1]?.name}`;
  let first = 0;
  for (const [name, { num_workers: count }] of Object.entries(script?.roles ?? {})) {
    if (rank < first + count) return `${name} ${rank - first}`;
    first += count;
  }
  return null;
}

// `rank 3 (ps 0)`.
export function rankName(spec, rank) {
  const role = roleOf(spec, rank);
  return role ? `rank ${rank} (${role})` : `rank ${rank}`;
}
