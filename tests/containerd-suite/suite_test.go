// Runs containerd's own snapshotter test suite against our service: a process of `serve.py` for each case.
package suite

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const startLimit = 60 * time.Second

func TestSnapshotter(t *testing.T) {
	python := os.Getenv("BOOTSEER_PYTHON")
	if python == "" {
		t.Skip("BOOTSEER_PYTHON names no interpreter with bootseer installed")
	}
	testsuite.SnapshotterSuite(t, "overlayfs", func(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		return start(python, root)
	})
}

// start runs a service with its files in root; the function it returns ends it.
func start(python, root string) (snapshots.Snapshotter, func() error, error) {
	socket := filepath.Join(root, "b.sock")
	service := exec.Command(python, "serve.py", filepath.Join(root, "b"), socket)
	service.Stderr = os.Stderr
	if err := service.Start(); err != nil {
		return nil, nil, fmt.Errorf("start the service: %w", err)
	}
	end := func() error {
		if err := service.Process.Kill(); err != nil {
			return err
		}
		service.Wait() // reports that it was killed
		return nil
	}
	for deadline := time.Now().Add(startLimit); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(socket); err == nil {
			break
		}
		if time.Now().After(deadline) {
			end()
			return nil, nil, fmt.Errorf("no socket %s within %s", socket, startLimit)
		}
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		end()
		return nil, nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	snapshotter := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(connection), "bootseer")
	return snapshotter, func() error { connection.Close(); return end() }, nil
}
