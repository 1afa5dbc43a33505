// uPlot, whose small file is a script that makes a global and no module; loaded when a curve is drawn.

await new Promise((resolve, reject) => {
  const script = document.createElement('script');
  script.src = new URL('../vendor/uplot.js', import.meta.url);
  script.onload = resolve;
  script.onerror = () => reject(new Error('uPlot can not be loaded'));
  document.head.append(script);
});

export default globalThis.uPlot;
