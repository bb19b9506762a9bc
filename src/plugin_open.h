/*
 * Finding, opening and checking a plug-in.  Part of the plug-in host (plugin.h); nothing else needs
 * it.
 */
#ifndef GQ_PLUGIN_OPEN_H
#define GQ_PLUGIN_OPEN_H

#include "gradq/optimizer.h"
#include "gradq/status.h"

/*
 * Find `name` (as gq_rule_load says), dlopen it and check its table: ABI, size, names, settings,
 * functions.  *warning (may be NULL) is written only when there is something to warn of.
 *
 * GQ_OK: *library_p is yours to dlclose, *plugin_p points into it.  GQ_NOTFOUND, GQ_ABI, GQ_INVALID
 * with *error: nothing is left open.
 */
GQ_CHECK gq_status gq_plugin_open (void **library_p, const gq_optimizer **plugin_p,
                                   const char *name, const char *directory, gq_error *warning,
                                   gq_error *error);

#endif
