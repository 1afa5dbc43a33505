// Loads uPlot when the first curve is drawn. Its file is a script that defines a global, not a module.

await new Promise((resolve, reject) => {
  const script = document.createElement('script');
  script.src = new URL('../vendor/uplot.js', import.meta.url);
  script.onload = resolve;
  script.onerror = () => reject(new Error('uPlot could not be loaded'));
  document.head.append(script);
});

export default globalThis.uPlot;
