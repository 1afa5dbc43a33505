// Metrics for which lower is better, and for which higher is better; others have no best value.
export const LESS = /loss|error|perplexity|_time_s|wait_s|(^|[/_])(mae|mse|rmse)$/;
export const MORE = /accuracy|samples_per_s|tokens_per_s|(^|[/_])(auc|f1|iou|r2|map|bleu|dice|precision|recall)/;
