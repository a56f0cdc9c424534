// A registry in memory with the referrers API, for tests: go-containerregistry's, and what registries of that kind do
// beyond it if asked. Prints host:port when it listens; ends with its standard input, so that none is left behind.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"sort"
	"strings"

	"github.com/google/go-containerregistry/pkg/registry"
)

var (
	referrers = flag.Bool("referrers", true, "have the referrers API")
	announce  = flag.Bool("announce", false, "answer the PUT of a manifest with OCI-Subject")
	page      = flag.Int("page", 0, "entries of one page of referrers; 0: all on one")
)

type descriptor map[string]any

func (d descriptor) digest() string {
	text, _ := d["digest"].(string)
	return text
}

// manifestOf is the manifest at the path of a repository, as the registry has it.
func manifestOf(inner http.Handler, repository, digest string) descriptor {
	answer := httptest.NewRecorder()
	inner.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, repository+"/manifests/"+digest, nil))
	found := descriptor{}
	_ = json.Unmarshal(answer.Body.Bytes(), &found)
	return found
}

// list answers for the referrers API: ordered, filtered, with the manifests' annotations, page by page.
func list(inner http.Handler, w http.ResponseWriter, r *http.Request) {
	answer := httptest.NewRecorder()
	inner.ServeHTTP(answer, r)
	var index struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Manifests     []descriptor `json:"manifests"`
	}
	if answer.Code != http.StatusOK || json.Unmarshal(answer.Body.Bytes(), &index) != nil {
		w.WriteHeader(answer.Code)
		_, _ = w.Write(answer.Body.Bytes())
		return
	}
	sort.Slice(index.Manifests, func(i, j int) bool { return index.Manifests[i].digest() < index.Manifests[j].digest() })
	query := r.URL.Query()
	repository, _, _ := strings.Cut(r.URL.Path, "/referrers/")
	kept := []descriptor{}
	for _, one := range index.Manifests {
		wanted := query.Get("artifactType")
		if one.digest() <= query.Get("last") || (wanted != "" && one["artifactType"] != wanted) {
			continue
		}
		if notes, ok := manifestOf(inner, repository, one.digest())["annotations"]; ok {
			one["annotations"] = notes
		}
		kept = append(kept, one)
	}
	if *page > 0 && len(kept) > *page {
		kept = kept[:*page]
		query.Set("last", kept[*page-1].digest())
		following := url.URL{Path: r.URL.Path, RawQuery: query.Encode()}
		w.Header().Set("Link", fmt.Sprintf("<%s>; rel=\"next\"", following.String()))
	}
	if query.Get("artifactType") != "" {
		w.Header().Set("OCI-Filters-Applied", "artifactType")
	}
	index.Manifests = kept
	w.Header().Set("Content-Type", index.MediaType)
	_ = json.NewEncoder(w).Encode(index)
}

func main() {
	flag.Parse()
	inner := registry.New(registry.WithReferrersSupport(*referrers), registry.Logger(log.New(io.Discard, "", 0)))
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if *referrers && r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/referrers/") {
			list(inner, w, r)
			return
		}
		if *announce && r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/manifests/") {
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			var manifest struct{ Subject struct{ Digest string } }
			if json.Unmarshal(body, &manifest) == nil && manifest.Subject.Digest != "" {
				w.Header().Set("OCI-Subject", manifest.Subject.Digest)
			}
		}
		inner.ServeHTTP(w, r)
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	log.Fatal(http.Serve(listener, handler))
}
