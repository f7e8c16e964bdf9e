"""`tandem serve`: a service that lives as long as the command."""

from pathlib import Path

import typer
from rich.console import Console

from ..config import TandemConfig
from ..launch import start_service
from ..signals import stopped_by_signals


def serve_in_foreground(config: TandemConfig, folder: Path, address: str | None) -> None:
    """Starts the service, says so on stdout, and stops it at SIGINT or SIGTERM. Raises LaunchError."""
    console = Console(stderr=True)
    with stopped_by_signals() as stopped:
        spinner = console.status(f"Starting {config.num_workers} worker(s) for {config.model}")
        spinner.start()
        try:
            with start_service(config, str(folder), address=address) as service:
                spinner.stop()
                console.print(f"status page: {service.status_url}", highlight=False)
                typer.echo(f"tandem ready grpc={service.grpc_address} http={service.http_address}")
                stopped.wait()
        finally:
            spinner.stop()
