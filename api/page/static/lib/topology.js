// Describes the roles of a job's ranks, and how they synchronize their models, from its document.

import { plural } from './format.js';

// The topology in a few words; null for the usual one, in which ranks average gradients in each step.
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

// The role of a rank with its index in the role, such as `ps 0`; null if all ranks do the same.
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
