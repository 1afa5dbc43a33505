// The only module that imports the vendored files of Preact and htm.

export {
  html, render, useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState,
} from '../vendor/preact-htm.js';
