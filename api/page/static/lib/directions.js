// Metrics for which lower is better, and for which higher is better; others have no best value.
// The server has the same words: service/domain/tracking/metric_directions.py.
const WORDS = ['loss', 'error', 'err', 'perplexity', 'ppl', 'mae', 'mse', 'rmse', 'nll', 'wer', 'cer'];
const wordsOf = (key) => key.replace(/([a-z])([A-Z])/g, '$1 $2').toLowerCase().split(/[^a-z]+/);
export const LESS = { test: (key) => wordsOf(key).some((word) => WORDS.includes(word)) || /_time_s|wait_s/.test(key) };
export const MORE = /accuracy|samples_per_s|tokens_per_s|(^|[/_])(auc|f1|iou|r2|map|bleu|dice|precision|recall)/;
