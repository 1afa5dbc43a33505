// Amounts of a node's resources.

import { bytes, whole } from '../../lib/format.js';

export const amount = (name, value) => (name === 'memory' ? bytes(value) : whole(Math.round(100 * value) / 100));
