# Written by `make blocking` from dray/_async/media.py: change that file instead.
"""The media of jobs: histograms, pictures and other values that are not numbers."""

from __future__ import annotations

from collections.abc import Generator
from os import PathLike
from pathlib import Path

from dray import views
from dray._http import media
from dray._http.downloads import OnProgress
from dray._http.transport import Call, params
from dray._sync.downloads import DownloadCalls


class MediaCalls(DownloadCalls):
    def media(self, job_id: str) -> views.MediaOverview:
        """Return the series of the job's media, and how many values were left out."""
        return self._read(views.MediaOverview, Call("GET", media.path_of(job_id)))

    def media_records(
        self,
        job_id: str,
        kind: str | None = None,
        key: str | None = None,
        *,
        rank: int | None = None,
        step: int | None = None,
        max_records: int | None = None,
    ) -> Generator[views.MediaRecord, None, None]:
        """Yield the media of the job in the order of the ranks, kinds, keys and steps, or only
        the media of a kind, key, rank or step.

        max_records: yield at most this number of records at equal distances, with the first and the
        last. Requires `kind` and `key`; the rank is 0 by default.
        """
        query = params(kind=kind, key=key, rank=rank, step=step, max_records=max_records)
        path = f"{media.path_of(job_id)}/records"
        return self._items(views.MediaPage, path, query, page_size=100)

    def download_media(
        self,
        job_id: str,
        dest: str | PathLike[str],
        kind: str | None = None,
        key: str | None = None,
        *,
        rank: int | None = None,
        step: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Write the media of the job to files below the folder `dest`, such as
        `image/sample/step-100.png`. Values that are not files are written as JSON, and texts as
        text.

        An interrupted download can be repeated; files that exist and are intact are not downloaded
        again. Returns the paths of the files.
        """
        paths: list[Path] = []
        for record in self.media_records(job_id, kind, key, rank=rank, step=step):
            file = media.remote_file(job_id, record)
            if file is not None:
                paths += self._fetch_all([file], dest, on_progress)
            else:
                paths.append(media.write(Path(dest), record))
        return paths
